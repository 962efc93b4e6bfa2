"""Every command says what it said before: exit status, JSON and the files it writes, on fixed inputs.

The cases are in ``commands.yaml`` and ``refusals.yaml``, what they said in ``outputs/``. On one machine,
``scripts/command_outputs.py`` compares two versions of the program to the last bit.
"""

from __future__ import annotations

import pytest

from tests.recorded.recorded_cases import command_outputs, differences_from_before, is_reworded

COMMANDS = command_outputs.scenarios(command_outputs.CASES / "commands.yaml")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_say_what_they_said(outputs_of):
    """All in one test: the libraries are imported once, which takes longer than most commands."""
    said = outputs_of("commands")
    assert said.keys() == {case.name for case in COMMANDS}
    assert {
        name: found for name in said if (found := differences_from_before("commands", name, said[name]))
    } == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_input_is_refused_as_it_was(outputs_of):
    refusals = outputs_of("refusals")["refusals"]
    before = command_outputs.read_kept("refusals")["refusals"]
    assert refusals.keys() == before.keys()
    for case, now in refusals.items():
        assert (now["status"], now["stdout"]) == (before[case]["status"], ""), case
        assert now["sentence"] == before[case]["sentence"], case


def test_a_number_a_key_and_a_type_that_change_are_found():
    before = {"a": [1, 2.0], "b": {"c": "x"}}
    for now in (
        {"a": [1, 2.1], "b": {"c": "x"}},
        {"a": [1, 2.0], "b": {}},
        {"a": [1.0, 2.0], "b": {"c": "x"}},
    ):
        assert len(list(command_outputs.differences(before, now, 1e-3))) == 1
    assert not list(command_outputs.differences(before, {"a": [1, 2.0001], "b": {"c": "x"}}, 1e-3))


def test_a_sentence_may_change_its_words_and_not_its_numbers():
    before = {"reasons": ["Its bound of 1,024 covers 0.5 of 2."], "status": "fits 2"}
    for now, others in (
        ({"reasons": ["The bound, 1,024, covers 0.5 of 2."], "status": "fits 2"}, 0),
        ({"reasons": ["Its bound of 1,025 covers 0.5 of 2."], "status": "fits 2"}, 1),
        ({"reasons": ["Its bound of 1,024 covers 0.5."], "status": "fits 2"}, 1),
        ({"reasons": ["Its bound of 1,024 covers 0.5 of 2."], "status": "suits 2"}, 1),
    ):
        found = command_outputs.differences(before, now)
        assert sum(not is_reworded(each) for each in found) == others


def test_numbers_that_change_places_change_what_is_kept():
    numbers = [float(number) for number in range(command_outputs.LONG + 1)]
    swapped = [*numbers[:3], numbers[4], numbers[3], *numbers[5:]]
    assert list(
        command_outputs.differences(
            command_outputs.condensed(numbers), command_outputs.condensed(swapped), 1e-6
        )
    )
