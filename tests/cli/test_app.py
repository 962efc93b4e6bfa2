"""The program as a whole: exit statuses, one-sentence errors, and which flags exist."""

import inspect
import json
import signal
import subprocess
import time
from importlib import import_module
from pathlib import Path

import pytest

import ropewalk.recipes
from ropewalk.cli.app import SUMMARIES, main, program
from tests.cli.option_cases import KEPT, commands, listing
from tests.programs import Program

COMMANDS = dict(commands())


def test_no_option_appears_or_vanishes_by_accident():
    """python -m tests.cli.option_cases > tests/cli/options.txt"""
    assert listing() == KEPT.read_text()


def test_the_list_of_commands_says_of_each_what_its_help_says():
    for name, line in SUMMARIES.items():
        function = COMMANDS[name].default_command if name in COMMANDS else None
        if function is not None and name not in ("search", "eval"):
            assert inspect.cleandoc(function.__doc__).split("\n\n")[0] == line


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_help_has_an_example(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    assert f"ropewalk {command}" in capsys.readouterr().out.split("Example", 1)[1]


def test_help_describes_arguments_and_options_with_defaults_as_people_type_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["eval", "--help"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "MODEL  A checkpoint's folder",
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
        (["rope", "plan", "embedded", "--from", "x", "--to", "8k"], "--from: 'x' is no length"),
        (["extend", "demo", "--set", "output"], "--set takes key=value"),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("inspect", "MODEL"), ("verify", "RECIPE"), ("eval compare", "A B"), ("data stats", "PATHS")],
)
def test_a_help_calls_arguments_by_their_own_names(command, arguments, capsys):
    assert main([*command.split(), "--help"]) == 0
    usage = capsys.readouterr().out.splitlines()[0]
    assert usage.startswith(f"Usage: ropewalk {command} [OPTIONS] {arguments}")


@pytest.mark.parametrize("group", [[], ["rope"], ["data"]])
def test_a_missing_command_is_status_2_with_the_help(group, capsys):
    assert main(group) == 2
    missing = capsys.readouterr()
    assert missing.out == ""
    assert main([*group, "--help"]) == 0
    assert missing.err == capsys.readouterr().out


def test_an_unexpected_error_is_one_sentence_and_debug_shows_more(monkeypatch, capsys):
    from ropewalk.planning import inspection

    # What imports the function while it is broken would keep it.
    import_module("ropewalk.planning.run")

    def broken(model, given_length):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(inspection, "read_checkpoint", broken)
    assert main(["inspect", "embedded"]) == 1
    assert capsys.readouterr().err == (
        "error: unexpected ZeroDivisionError: a defect (run with --debug for the traceback)\n"
    )
    assert main(["--debug", "inspect", "embedded"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["inspect"], ["extend"], ["data", "stats"], ["eval"], ["rope", "bound"]]
)
def test_h_is_help(arguments, capsys):
    assert main([*arguments, "--help"]) == 0
    long = capsys.readouterr().out
    assert main([*arguments, "-h"]) == 0
    assert capsys.readouterr().out == long
    assert "Usage" in long


def test_help_names_every_shipped_recipe(capsys):
    assert main(["extend", "--help"]) == 0
    printed = capsys.readouterr().out
    names = [path.stem for path in Path(ropewalk.recipes.__path__[0]).glob("*.yaml")]
    assert "llama-64k" in names
    assert all(name in printed for name in names)


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
        options = {each for argument in command.assemble_argument_collection() for each in argument.names}
        assert proposed[f"{name} --"] >= {each for each in options if each.startswith("--")}


def test_json_is_all_there_is_on_stdout(capsys):
    assert main(["inspect", "embedded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_position_embeddings"] == 256


def test_ctrl_c_is_status_130(tmp_path):
    program = (
        "import pathlib, signal, sys, time, ropewalk.training\n"
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait(*arguments):\n"
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    time.sleep(60)\n"
        "ropewalk.training.load_recipe = wait\n"
        "from ropewalk.cli.app import main\n"
        "sys.exit(main(['extend', 'demo']))\n"
    )
    waiting = tmp_path / "waiting"
    process = Program(program, waiting)
    while not waiting.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "error: interrupted: nothing has begun yet; the same command starts again\n"
