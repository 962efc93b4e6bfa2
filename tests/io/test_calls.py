"""Calls from Python become the settings that they mean, and mistakes one sentence that names the keyword."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from ropewalk import RopewalkError
from ropewalk.io.calls import as_keywords, keywords_of, settings_from
from ropewalk.io.settings import CommaList, FilePath, Length, Lengths, Option, Overrides, Settings


class Cut(Settings):
    length: Annotated[Length, Option(name="--to")]
    seed: int = 0


class Wool(Settings):
    kind: Literal["hemp", "sisal"] = "hemp"
    files: tuple[FilePath, ...] = ()


class Rope(Settings):
    strands: tuple[str, ...]
    cut: Cut
    wool: Wool = Wool()
    other: Wool | None = None
    lengths: Lengths | None = None
    names: CommaList = ()
    from_length: Annotated[int | None, Option(name="--from")] = None
    changes: Overrides = ()


class Place(Settings):
    folder: Path | None = None
    seed: int = Field(default=7, ge=1)


def made(**given):
    return settings_from({"strands": "a", "to": 4, **given}, Rope, Place)


def test_keywords_are_fields_of_all_groups_and_their_options():
    known = keywords_of(Rope, Place)
    assert known["length"] == known["to"] == ("Rope", "cut", "length")
    # Fewest groups around it; and a word that Python keeps to itself can be no keyword.
    assert known["seed"] == ("Place", "seed")
    assert known["from_length"] == ("Rope", "from_length")
    assert "from" not in known
    assert known["kind"] == ("Rope", "wool", "kind")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, Rope(strands=("a",), cut=Cut(length=4))),
        ({"strands": Path("a") / "b"}, Rope(strands=("a/b",), cut=Cut(length=4))),
        ({"strands": range(0)}, Rope(strands=(), cut=Cut(length=4))),
        ({"to": "1k"}, Rope(strands=("a",), cut=Cut(length=1024))),
        ({"lengths": 8}, Rope(strands=("a",), cut=Cut(length=4), lengths=(8,))),
        ({"lengths": "8,1k"}, Rope(strands=("a",), cut=Cut(length=4), lengths=(8, 1024))),
        ({"names": "x,y"}, Rope(strands=("a",), cut=Cut(length=4), names=("x", "y"))),
        ({"names": {"x"}}, Rope(strands=("a",), cut=Cut(length=4), names=("x",))),
        ({"kind": "sisal"}, Rope(strands=("a",), cut=Cut(length=4), wool=Wool(kind="sisal"))),
        ({"files": "f"}, Rope(strands=("a",), cut=Cut(length=4), wool=Wool(files=("f",)))),
        (
            {"wool": Wool(kind="sisal"), "files": ["f"]},
            Rope(strands=("a",), cut=Cut(length=4), wool=Wool(kind="sisal", files=("f",))),
        ),
        ({"cut": {"seed": 3}}, Rope(strands=("a",), cut=Cut(length=4, seed=3))),
        ({"other": {}}, Rope(strands=("a",), cut=Cut(length=4), other=Wool())),
        ({"changes": "a.b=1"}, Rope(strands=("a",), cut=Cut(length=4), changes=("a.b=1",))),
        (
            {"changes": {"a.b": [1, None], "c": Path("d")}},
            Rope(strands=("a",), cut=Cut(length=4), changes=("a.b=[1, null]", 'c="d"')),
        ),
    ],
)
def test_values_may_have_the_forms_of_the_command_line(given, read):
    rope, place = made(**given)
    assert (rope, place) == (read, Place())


def test_each_class_gets_its_own_keywords():
    rope, place = made(seed=3, folder="here")
    assert rope.cut.seed == 0
    assert place == Place(folder=Path("here"), seed=3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"to": "long"}, "to: 'long' is not a length"),
        ({"to": 1.5}, "to must be a whole number, got 1.5"),
        ({"to": object()}, "to must be a whole number, got <object object at"),
        ({"to": [[0] * 99]}, "to must be a whole number"),
        ({"seed": 0}, "seed must be 1 or more, got 0"),
        ({"seed": True}, "seed must be a whole number, got True"),
        ({"cut": {"seed": "x"}}, "cut.seed must be a whole number, got 'x'"),
        ({"cut": {"sed": 1}}, "unknown key cut.sed; did you mean seed?"),
        ({"kind": "hamp"}, "unknown kind 'hamp'; did you mean hemp?"),
        ({"folder": 5}, "folder must be a path, got 5"),
        ({"names": ["x", 5]}, "names.1 must be a string, got 5"),
        ({"wool": Place()}, "wool must be a mapping of kind, files, got Place"),
        ({"string": "b"}, "unknown keyword string; did you mean strands?"),
        ({"length_": 1}, "unknown keyword length_; did you mean length?"),
        ({"qqq": 1}, "unknown keyword qqq; keywords are the options of the command, with _ for -"),
        ({"length": 4}, "to and length are the same setting; give one of them"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_keyword(given, sentence):
    with pytest.raises(RopewalkError) as raised:
        made(**given)
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_what_is_missing_is_named_as_a_keyword_whatever_group_it_is_in():
    with pytest.raises(RopewalkError) as raised:
        settings_from({}, Rope, Place)
    assert str(raised.value) == "strands is missing; length is missing"


def test_the_first_argument_is_settings_a_mapping_of_keywords_or_one_value():
    assert as_keywords(Cut, "length", "1k") == {"length": "1k"}
    assert as_keywords(Cut, "length", {"to": 3, "seed": 1}) == {"to": 3, "seed": 1}
    rope = Rope(strands=("a",), cut=Cut(length=4), wool=Wool(files=("f",)))
    kept = as_keywords(Rope, "strands", rope)
    (same,) = settings_from(kept, Rope)
    assert same == rope
    # Checks tell what was given from a default of the same value.
    assert same.model_fields_set == rope.model_fields_set == {"strands", "cut", "wool"}
    (changed,) = settings_from({**kept, "kind": "sisal"}, Rope)
    assert changed.wool == Wool(kind="sisal", files=("f",))
    assert rope.wool.kind == "hemp"
