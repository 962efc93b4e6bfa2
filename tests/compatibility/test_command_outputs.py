"""Every command says what it said before: exit status, JSON and the files it writes, on fixed inputs.

The cases are in ``commands.yaml`` and ``refusals.yaml``, what they said in ``outputs/``. On one machine,
``scripts/command_outputs.py`` compares two versions of the program to the last bit.
"""

from __future__ import annotations

import pytest

from tests.compatibility.compatibility_cases import command_outputs, differences_from_before

RENAMED: dict[str, str] = {
    "ladder": "ablation",
    "ladder_samples": "ablation_samples",
    "mends": "mitigations",
}
"""JSON keys that were given another name on purpose: the old name, and the new one."""

CHANGED_SENTENCES: dict[str, str] = {}
"""Refusals whose words were changed on purpose: the case, and what its sentence says now."""

COMMANDS = command_outputs.scenarios(command_outputs.CASES / "commands.yaml")


@pytest.fixture(scope="module")
def fast(outputs_of):
    return outputs_of("commands", [case.name for case in COMMANDS if case.fast])


@pytest.fixture(scope="module")
def refusals(outputs_of):
    return outputs_of("refusals", [])["refusals"]


@pytest.mark.parametrize("name", [case.name for case in COMMANDS if case.fast])
def test_commands_say_what_they_said(fast, name):
    assert differences_from_before("commands", name, fast[name], RENAMED) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [case.name for case in COMMANDS if not case.fast])
def test_slow_commands_say_what_they_said(outputs_of, name):
    said = outputs_of("commands", [name])[name]
    assert differences_from_before("commands", name, said, RENAMED) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_input_is_refused_as_it_was(refusals):
    before = command_outputs.read_kept("refusals")["refusals"]
    assert refusals.keys() == before.keys()
    for case, now in refusals.items():
        sentence = CHANGED_SENTENCES.get(case, before[case]["sentence"])
        assert (now["status"], now["stdout"], now["sentence"]) == (before[case]["status"], "", sentence), case


def test_a_number_a_key_and_a_type_that_change_are_found():
    before = {"a": [1, 2.0], "b": {"c": "x"}}
    for now in (
        {"a": [1, 2.1], "b": {"c": "x"}},
        {"a": [1, 2.0], "b": {}},
        {"a": [1.0, 2.0], "b": {"c": "x"}},
    ):
        assert len(list(command_outputs.differences(before, now, 1e-3))) == 1
    assert not list(command_outputs.differences(before, {"a": [1, 2.0001], "b": {"c": "x"}}, 1e-3))


def test_numbers_that_change_places_change_what_is_kept():
    numbers = [float(number) for number in range(command_outputs.LONG + 1)]
    swapped = [*numbers[:3], numbers[4], numbers[3], *numbers[5:]]
    assert list(
        command_outputs.differences(
            command_outputs.condensed(numbers), command_outputs.condensed(swapped), 1e-6
        )
    )
