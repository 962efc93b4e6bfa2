"""Options made of settings: their help, their refusals and what a shell completes."""

import re
import subprocess
from typing import Annotated

import pytest

from ropewalk.cli.app import main, program
from ropewalk.cli.binding import make_command
from ropewalk.io.settings import Option
from tests.cli.option_cases import commands

COMMANDS = dict(commands())


def test_help_describes_arguments_and_options_with_defaults_as_people_type_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["eval", "--help-all"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "MODEL  Checkpoint folder",
        "--suite NAME,...",
        "[default: perplexity,passkey]",
        "--short-context LENGTH",
        "[default: 4k]",
        "--exact-rope --no-exact-rope",
        "[0 to 100] [default: 85.6]",
    ):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["extnd"], "unknown command 'extnd'; did you mean extend?"),
        (["--versio"], "unknown option --versio; did you mean --version?"),
        (["rope", "bond"], "unknown command 'bond'; did you mean bound?"),
        (["extend"], "missing argument RECIPE"),
        (["extend", "demo", "--st", "a=1"], "unknown option --st; did you mean --set?"),
        (["eval", "x", "--samples", "many"], "--samples"),
        (["init", "x", "--target", "8k", "y"], "unexpected argument 'y' (see"),
        (
            ["init", "x", "--documents", "books", "code", "--target", "8k"],
            "unexpected argument 'code'; write --documents before each of its values",
        ),
        (["rope", "plan", "embedded", "--from", "x", "--to", "8k"], "--from: 'x' is not a length"),
        (["extend", "demo", "--set", "output"], "--set needs key=value"),
        (["compare", "demo", "--resume"], "no option --resume; run the same command again without it"),
        (["audit", "embedded", "--resume"], "unknown option --resume"),
        (["audit", "embedded", "--twi"], "unknown option --twi;"),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_a_help_says_once_that_an_option_may_be_repeated():
    for name, command in COMMANDS.items():
        for argument in command.assemble_argument_collection():
            assert argument.parameter.help.lower().count("may be repeated") <= 1, (name, argument.name)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_help_fits_on_two_screens_and_names_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*name.split(), "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 100
    assert main([*name.split(), "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert (short == whole) == ("--help-all describes all options." not in short)
    # Wide enough that no name of an option is broken into lines beside its text.
    monkeypatch.setenv("COLUMNS", "400")
    assert main([*name.split(), "--help-all"]) == 0
    words, all_words = " ".join(short.split()), " ".join(capsys.readouterr().out.replace("│", " ").split())
    for argument in COMMANDS[name].assemble_argument_collection():
        if argument.show and argument.name.startswith("--"):
            assert re.search(rf"{re.escape(argument.name)}\b(?!-)", words)
            assert argument.parameter.help.split(". ")[0].rstrip(".") in all_words


def test_a_former_name_sets_the_same_value_and_no_help_shows_it(capsys):
    got = []

    def command(
        *,
        control: Annotated[bool, Option(formerly=("--twin",))] = True,
        number: Annotated[int, Option(formerly=("--old-number", "--older-number"))] = 1,
    ):
        """Count."""
        got.append((control, number))

    app = make_command(command, "x", "")
    for line in (
        [],
        ["--no-twin", "--old-number", "2"],
        ["--older-number=3"],
        ["--no-control", "--number", "4"],
    ):
        app(line, result_action="return_value", exit_on_error=False)
    assert got == [(True, 1), (False, 2), (True, 3), (False, 4)]
    app(["--help"], result_action="return_value", exit_on_error=False)
    printed = capsys.readouterr().out
    assert "--number" in printed
    assert "old" not in printed
    assert "twin" not in printed


@pytest.mark.parametrize("group", [[], ["rope"], ["data"]])
def test_a_missing_command_is_status_2_with_the_help(group, capsys):
    assert main(group) == 2
    missing = capsys.readouterr()
    assert missing.out == ""
    assert main([*group, "--help"]) == 0
    assert missing.err == capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["inspect"], ["extend"], ["data", "stats"], ["eval"], ["rope", "bound"]]
)
def test_h_is_help(arguments, capsys):
    assert main([*arguments, "--help"]) == 0
    long = capsys.readouterr().out
    assert main([*arguments, "-h"]) == 0
    assert capsys.readouterr().out == long
    assert "Usage" in long


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """What bash proposes for the last word of each of several command lines."""
    script = tmp_path_factory.mktemp("completion") / "ropewalk.bash"
    script.write_text(program().generate_completion(shell="bash"))

    def call(*lines):
        calls = [
            f"source {script}",
            'complete_() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); '
            '_ropewalk "$1" "${@: -1}" "${@: -2:1}"; echo "${COMPREPLY[@]}"; }',
            *(f"complete_ ropewalk {line}" for line in lines),
        ]
        done = subprocess.run(["bash", "-c", "\n".join(calls)], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return dict(zip(lines, (set(line.split()) for line in done.stdout.splitlines()), strict=True))

    return call


def test_a_shell_completes_commands_and_choices(completed):
    expected = {
        "ex": {"export", "extend"},
        "rope b": {"bound", "base"},
        "search --objective ne": {"needle"},
        "data pack --packing b": {"best_fit"},
    }
    assert completed(*expected) == expected


def test_a_shell_completes_the_options_of_every_command(completed):
    proposed = completed(*(f"{name} --" for name in COMMANDS))
    for name, command in COMMANDS.items():
        arguments = command.assemble_argument_collection()
        options = {each for argument in arguments if argument.show for each in argument.names}
        assert proposed[f"{name} --"] >= {each for each in options if each.startswith("--")}
