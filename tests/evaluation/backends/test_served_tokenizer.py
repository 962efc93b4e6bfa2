"""The tokenizer of a served model is looked for in a known order, and words never count unasked."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.served import Served
from ropewalk.evaluation.backends.served_tokenizer import served_tokenizer
from ropewalk.evaluation.backends.text_counters import WordCounter
from tests.evaluation.core_cases import byte_tokenizer


@dataclass
class Server:
    """What is asked of a server that was found."""

    model: str = "owner/served"
    served: Served = field(default_factory=Served)
    counts: bool = True
    bos: str | None = "<s>"

    def own_tokenizer(self) -> Any:
        if not self.counts:
            raise RopewalkError("the server does not count tokens with /tokenize (HTTP 404)")
        return byte_tokenizer(bos=self.bos)


@dataclass
class Pool:
    backends: list[Server]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were loaded; only those that end in -there are there."""
    names: list[str] = []

    def load(name: str) -> Any:
        names.append(name)
        if not name.endswith("-there"):
            raise RopewalkError(f"there is no {name}")
        return byte_tokenizer()

    monkeypatch.setattr("ropewalk.data.load_tokenizer", load)
    return names


def found(server: Server, model: str | None = None, wanted: str | None = None) -> tuple[str | None, str]:
    chosen = served_tokenizer(model, wanted, Pool([server]))  # type: ignore[arg-type]
    return chosen.path, chosen.source


def test_names_are_tried_in_order_and_the_server_is_last(asked: list[str], tmp_path: Path) -> None:
    root = Served(root="org/root-there")
    assert found(Server(served=root), "me/given-there")[0] == "me/given-there"
    with pytest.raises(
        RopewalkError, match=r"no me/given; the server serves owner/served: leave MODEL out, or say"
    ):
        found(Server(served=root), "me/given")
    # The name of the model, or of its checkpoint, may be given: it chooses nothing.
    for name in (None, "owner/served", "org/root-there"):
        assert found(Server(served=root), name) == (
            "org/root-there",
            "tokens are counted with the tokenizer of org/root-there, the checkpoint that the server names",
        )
    assert asked == ["me/given-there", "me/given", *["org/root-there"] * 3]
    gone = Server("owner/name-there", Served(root="org/root"))
    assert found(gone)[1].endswith("owner/name-there, the model's name on the server (there is no org/root)")
    named = Server("owner/name-there", Served(root="/models/elsewhere"))
    assert found(named)[1].endswith("owner/name-there, the model's name on the server")
    # A folder of another machine, and a name without an owner, are not asked for on the Hub.
    asked.clear()
    assert found(Server("llama3:8b", Served(root="/models/elsewhere"))) == (
        None,
        "tokens are counted by the server's /tokenize",
    )
    assert asked == []
    assert found(Server())[1] == "tokens are counted by the server's /tokenize (there is no owner/served)"
    # A folder that is here is meant, whatever the server says of itself.
    here = tmp_path / "given"
    here.mkdir()
    with pytest.raises(RopewalkError, match=r"there is no .*given"):
        found(Server(served=root), str(here))


def test_what_the_user_says_is_taken_and_nothing_else(asked: list[str]) -> None:
    assert found(Server(), "me/given-there", "server")[1] == "tokens are counted by the server's /tokenize"
    assert asked == []
    without = found(Server(bos=None), "me/given-there", "server")[1]
    assert without == "tokens are counted by the server's /tokenize, which adds no BOS, so prompts have none"
    assert found(Server(), "me/given", "other/one-there")[0] == "other/one-there"
    with pytest.raises(RopewalkError, match="there is no other/one"):
        found(Server(), None, "other/one")
    with pytest.raises(RopewalkError, match="does not count tokens"):
        found(Server(counts=False), None, "server")
    chosen = served_tokenizer(None, "words", Pool([Server()]))  # type: ignore[arg-type]
    assert isinstance(chosen.tokenizer, WordCounter)
    assert chosen.record["approximate"] is True


def test_words_never_count_unasked(asked: list[str]) -> None:
    with pytest.raises(RopewalkError) as caught:
        found(Server(counts=False))
    for part in ("there is no owner/served", "HTTP 404", "--tokenizer words to estimate"):
        assert part in str(caught.value)
