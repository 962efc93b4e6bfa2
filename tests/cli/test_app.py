"""The program as a whole: exit statuses, one-sentence errors, and which flags exist."""

import inspect
import io
import itertools
import json
import signal
import time
from importlib import import_module

import pytest
from rich.console import Console

from ropewalk.cli.app import SUMMARIES, main, program
from ropewalk.io.settings import COMMON
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.cli.option_cases import KEPT, commands, listing
from tests.programs import Program

COMMANDS = dict(commands())
SCREEN = 24
"""Lines of a usual terminal."""


def test_no_option_appears_or_vanishes_by_accident():
    """python -m tests.cli.option_cases > tests/cli/options.txt"""
    assert listing() == KEPT.read_text()


def test_the_list_of_commands_says_of_each_what_its_help_says():
    for name, line in SUMMARIES.items():
        function = COMMANDS[name].default_command if name in COMMANDS else None
        if function is not None and name not in ("search", "eval"):
            assert " ".join(inspect.cleandoc(function.__doc__).split("\n\n")[0].split()) == line


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_help_has_an_example(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    assert f"ropewalk {command}" in capsys.readouterr().out.split("Example", 1)[1]


def _help(command: str, width: int = 80) -> str:
    """The help of a command on a terminal of so many columns."""
    text = io.StringIO()
    program().help_print(command.split(), console=Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_help_breaks_paragraphs_only_at_the_width(command):
    lines = _help(command, width=80).splitlines()
    for line, following in itertools.pairwise(lines):
        # A line ends where the next word does not fit; boxes and the table of commands are laid out on their own.
        if line.strip() and following.strip() and not {line[0], following[0]} & set("╭│╰ "):
            assert len(line.rstrip()) + 1 + len(following.split()[0]) > 80, (line, following)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_help_longer_than_a_screen_begins_with_the_common_options(command):
    text = _help(command)
    headings = [line.strip("╭─╮ ") for line in text.splitlines() if line.startswith("╭")]
    options = [name for name in headings if name not in ("Commands", "Arguments")]
    if len(text.splitlines()) >= 30:
        assert options[0] == COMMON.group
        common = text.split(COMMON.group)[1].split("╰")[0]
        assert len(common.splitlines()) <= SCREEN
    else:
        assert COMMON.group not in headings


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        *(("inspect", "MODEL"), ("verify", "RECIPE"), ("eval compare", "A B"), ("data stats", "PATHS")),
        *(("eval view", "FOLDER [OTHER]"), ("models", "[FAMILY]")),
    ],
)
def test_a_help_calls_arguments_by_their_own_names(command, arguments, capsys):
    assert main([*command.split(), "--help"]) == 0
    usage = capsys.readouterr().out.splitlines()[0]
    assert usage.startswith(f"Usage: ropewalk {command} [OPTIONS] {arguments}")


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


def test_json_is_all_there_is_on_stdout(capsys):
    assert main(["inspect", "embedded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_position_embeddings"] == 256


@pytest.mark.slow
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
    assert errors == "error: interrupted: nothing has started yet; run the same command to start again\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "https://me:hunter22@host/model?token=hunter22"],
        ["data", "stats", "https://me:hunter22@host/x.jsonl?X-Amz-Signature=hunter22"],
        ["data", "pack", "text.jsonl", "--out", "s3://me:hunter22@bucket/rows?sig=hunter22"],
        ["eval", "embedded", "--server", "http://me:hunter22@host:port/v1?key=hunter22"],
        ["eval", "embedded", "--rope", "https://me:hunter22@host/f.json?sig=hunter22"],
    ],
)
def test_credentials_in_a_url_are_in_no_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert "hunter22" not in said


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "MODEL", "--suite", "perplexity", "--lengths", "32", "--out", "OUT"],
        ["audit", "MODEL", "--length", "32", "--samples", "1", "--shifts", "0,16"],
        ["rope", "probe", "MODEL", "--to", "128", "--rows", "1"],
        ["search", "MODEL", "--to", "128", "--budget", "50", "--documents", "1", "--out", "OUT.json"],
        ["init", "MODEL", "--documents", "embedded:validation", "--target", "128", "--out", "OUT.yaml"],
    ],
    ids=lambda command: command[0],
)
def test_every_job_refuses_a_tokenizer_that_is_larger_than_the_embedding(command, tmp_path, capsys):
    folder = save_byte_checkpoint(tmp_path / "model", 64)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<outside>"}))
    places = {"MODEL": str(folder), "OUT": str(tmp_path / "out")}
    filled = [places.get(word, word.replace("OUT", places["OUT"])) for word in command]
    assert main(filled) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "error: the tokenizer has 259 tokens, but the model's embedding has only 258 rows; use the tokenizer that "
        "belongs to the model"
    )
