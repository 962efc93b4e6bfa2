"""The program as a whole: exit statuses, one-sentence errors, and which flags exist."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

import ropewalk.recipes
from ropewalk.cli.app import main
from tests.programs import Program

FLAGS = {
    "inspect": {"--target", "--explain", "--from", "--plot", "--json"},
    "rope bound": {"--rope-theta", "--rotary-dim", "--compare", "--plot", "--json"},
    "rope base": {"--length", "--rotary-dim", "--ceiling", "--plot", "--json"},
    "rope theta": {
        "--rope-theta",
        "--from",
        "--to",
        "--rotary-dim",
        "--rule",
        "--ceiling",
        "--plot",
        "--json",
    },
    "rope frequencies": {
        "--method",
        "--rope-theta",
        "--rotary-dim",
        "--from",
        "--to",
        "--factor",
        "--factors",
        "--plot",
        "--json",
    },
    "rope plan": {"--to", "--from", "--rule", "--explain", "--json"},
    "rope probe": {
        "--text",
        "--to",
        "--rules",
        "--rows",
        "--from",
        "--dtype",
        "--device",
        "--plot",
        "--json",
    },
    "audit": {
        "--text",
        "--length",
        "--samples",
        "--shifts",
        "--delta2",
        "--dtypes",
        "--ablation-samples",
        "--random-control",
        "--costs",
        "--device",
        "--seed",
        "--plot",
        "--json",
    },
    "search": {
        "--to",
        "--out",
        "--text",
        "--documents",
        "--held-out",
        "--objective",
        "--short-penalty",
        "--start-tokens",
        "--largest",
        "--attention-factor",
        "--algorithm",
        "--budget",
        "--racing",
        "--batch",
        "--prefill-chunk",
        "--seed",
        "--dtype",
        "--device",
        "--resume",
        "--plot",
        "--json",
    },
    "search show": {"--plot", "--json"},
    "search import": {"--out", "--model", "--to", "--start-tokens", "--json"},
    "extend": {"--set", "--rope", "--resume", "--json"},
    "export": {"--rope", "--out", "--json"},
    "eval": {
        "--average",
        "--batch-size",
        "--beyond-config",
        "--chat",
        "--compat",
        "--concurrency",
        "--depths",
        "--device",
        "--dtype",
        "--engine",
        "--essays",
        "--evaluator",
        "--exact-rope",
        "--exclude",
        "--haystack",
        "--hotpotqa",
        "--json",
        "--last",
        "--lengths",
        "--lines",
        "--lm-eval-data",
        "--lm-eval-include",
        "--lm-eval-limit",
        "--lm-eval-tasks",
        "--out",
        "--parallel",
        "--prefill-chunk",
        "--retries",
        "--rope",
        "--rows",
        "--samples",
        "--samples-dir",
        "--seed",
        "--send",
        "--server",
        "--server-extra",
        "--server-model",
        "--short-context",
        "--squad",
        "--stride",
        "--suite",
        "--tasks",
        "--text",
        "--threshold",
        "--timeout",
        "--windows",
    },
    "eval compare": {"--json", "--plot", "--seed"},
    "eval rescore": {"--json"},
    "data pack": {
        "--tokenizer",
        "--length",
        "--pattern",
        "--positions",
        "--bos",
        "--eos",
        "--long-documents",
        "--packing",
        "--remainder",
        "--tag",
        "--interleave",
        "--chunk-min",
        "--chunk-max",
        "--chunk-parts",
        "--chunk-cuts",
        "--weights",
        "--shares",
        "--total-tokens",
        "--long-from",
        "--long-factor",
        "--long-share",
        "--length-shares",
        "--per",
        "--max-epochs",
        "--shortage",
        "--shuffle",
        "--seed",
        "--validation-documents",
        "--validation-fraction",
        "--text-field",
        "--source-field",
        "--max-documents",
        "--out",
        "--shard",
        "--token-store",
        "--workers",
        "--json",
    },
    "data merge": {"--out", "--json"},
    "data stats": {
        "--tokenizer",
        "--length",
        "--text-field",
        "--source-field",
        "--max-documents",
        "--workers",
        "--plot",
        "--json",
    },
    "data preview": {"--rows", "--tokenizer", "--tokens", "--json"},
    "verify": {"--set", "--layers", "--rows", "--length", "--ranks", "--out", "--json"},
}


def commands():
    """{command line: options} of the whole program, from the program itself."""
    from ropewalk.cli.app import program
    from ropewalk.cli.commands import TYPER_COMMANDS, typer_program

    def walk_typer(command, prefix):
        for name, inner in command.commands.items():
            path = f"{prefix} {name}".strip()
            if hasattr(inner, "commands"):
                yield from walk_typer(inner, path)
            else:
                flags = {p.opts[0] for p in inner.params if p.opts[0].startswith("--")}
                yield path, flags - {"--help"}

    def walk(app, prefix):
        if app.default_command is not None and app.show:
            yield (
                prefix,
                {each.name for each in app.assemble_argument_collection() if each.name.startswith("--")},
            )
        for name in app:
            if not name.startswith("-") and f"{prefix}{name}" not in TYPER_COMMANDS:
                yield from walk(app[name], f"{prefix} {name}".strip())

    return {**dict(walk_typer(typer_program(), "")), **dict(walk(program(), ""))}


def test_no_flag_appears_or_vanishes_by_accident():
    assert commands() == FLAGS


@pytest.mark.parametrize("command", sorted(FLAGS))
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
        (["extend"], "Missing argument"),
        (["extend", "demo", "--st", "a=1"], "No such option"),
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


def test_an_unexpected_error_is_one_sentence_and_debug_shows_more(monkeypatch, capsys):
    from ropewalk.planning import inspection

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


def test_a_shell_completes_commands_options_and_choices(tmp_path):
    from ropewalk.cli.app import program

    script = tmp_path / "ropewalk.bash"
    script.write_text(program().generate_completion(shell="bash"))
    for words, expected in (
        ("ex", {"export", "extend"}),
        ("search --ra", {"--racing"}),
        ("search --objective ne", {"needle"}),
    ):
        line = ["ropewalk", *words.split()]
        bash = (
            f"source {script}; COMP_WORDS=({' '.join(line)}); COMP_CWORD={len(line) - 1}; _ropewalk ropewalk "
            f'{line[-1]} {line[-2]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == expected, done.stderr


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
