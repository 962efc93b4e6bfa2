"""The command line: parse, call, print. Each command lives in a module of the same name in this folder."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from functools import cache

from cyclopts import App

from ropewalk.cli.binding import HELP_ALL, HELP_FLAGS, UsageError, UsageErrors, usage_sentence, whole_help
from ropewalk.errors import Echo, RopewalkError
from ropewalk.io.signals import ignore_signals
from ropewalk.versions import VERSION, needs

INTERRUPTED = 130
MOST_OF_A_MESSAGE = 2000
"""Longest error in characters that is printed: a message may repeat a value as large as a file."""

SUMMARIES = {
    "inspect": "Show a checkpoint's RoPE and supported context length. With --target, show how to reach a longer "
    "context.",
    "models": "Show which model families are supported, and why others are not.",
    "init": "Write a recipe (a YAML file with the settings of a training run) for a model, documents and a "
    "machine.",
    "plan": "Estimate the memory, time and cost of a training run. Needs no GPU.",
    "rope": "Compute RoPE bases and frequencies for a context length, plan training stages, or compare RoPE settings "
    "on a checkpoint.",
    "audit": "Measure how much rounding changes attention when the same text moves to other positions. Also find which "
    "operation causes the change, and what reduces it.",
    "data": "Pack documents into rows (training sequences), count documents and tokens, or print packed rows.",
    "search": "Find LongRoPE's rescale factors for a longer context, or show or import a table of factors.",
    "extend": "Extend a model's context: evaluate, change RoPE, train, evaluate again, save.",
    "watch": "Show a run while it trains: loss, speed, memory, scores so far and the time left.",
    "compare": "Compare variants of a training run: run a recipe with several settings and seeds, or read finished "
    "runs.",
    "recipe": "List or print the recipes that ropewalk ships, or check a recipe before a run.",
    "export": "Upload a model to the Hub, write a run's checkpoint as a model, put LongRoPE factors into a model, or "
    "add RoPE data to a GGUF file.",
    "eval": "Measure a checkpoint on long-context and short-context benchmarks, with 95 % confidence intervals.",
    "verify": "Verify that packing, parallelism, and saving and resuming do not change your model's results, and "
    "that the model applies the recipe's RoPE.",
    "probe-trainer": "Test a trainer for attention between documents, wrong labels, wrong loss averages, wrong RoPE "
    "and wrong sliding windows.",
}
"""One line on each command, in the order of the help; available without importing the command's module."""


class _Remarks(logging.Handler):
    """Prints the library's log records on stderr in the style of the commands' own notes."""

    def emit(self, record: logging.LogRecord) -> None:
        from ropewalk.cli.output import notes

        notes.say(record.getMessage())


_REMARKS = _Remarks(logging.WARNING)


def quiet_libraries() -> None:
    """Keep progress bars and advice of other libraries out of the output, which has one line per fact."""
    # tokenizers otherwise warns whenever a process forks after it has used its threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


@cache
def program() -> App:
    """The whole program; a command's module is imported only when that command runs."""
    app = App(
        name="ropewalk",
        help="Extend the context window of RoPE language models. Add --debug to any command to see the traceback of an "
        "error.",
        version=f"ropewalk {VERSION}",
        version_flags="--version",
        help_flags=HELP_FLAGS,
        help_format="plaintext",
        # main() turns errors and Ctrl-C into one line and an exit status, so cyclopts must neither print nor exit.
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for place, (name, summary) in enumerate(SUMMARIES.items()):
        # By name, so that a command's modules are imported only when it runs: --help stays fast.
        app.command(f"ropewalk.cli.{name.replace('-', '_')}:app", name=name, help=summary, sort_key=place)
    app.register_install_completion_command(help="Install completion for the current shell.")
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed, 2 bad input, 75 stopped, 130 interrupted."""
    from ropewalk.cli.output import Interrupted, notes, results

    # Before any command imports transformers, which sets up its own logging and warnings on import.
    quiet_libraries()
    logging.getLogger("ropewalk").addHandler(_REMARKS)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    # Removed here so that it works at any place of the command line.
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if _lacks_command(arguments):
            # Help that nobody asked for goes to stderr, with the status of wrong usage.
            program()(arguments, console=notes)
            return 2
        # Help is a result: it goes to stdout, so that it can be piped into a pager.
        with whole_help(HELP_ALL in arguments):
            program()(arguments, console=results())
        return 0
    except Interrupted as error:
        return _fail_once(f"interrupted: {error}", INTERRUPTED)
    except Echo as error:
        # All processes of a run raise this, but only the first prints it.
        return error.status
    # Before its base class RopewalkError, which gets no hint at --help.
    except UsageError as error:
        return _fail_once(f"{error} (see {_command_in(arguments)} --help)", 2)
    except UsageErrors as error:
        return _fail_once(f"{usage_sentence(error)} (see {_command_in(arguments)} --help)", 2)
    except RopewalkError as error:
        if debug:
            _print_traceback()
        return _fail(str(error), error.status)
    except KeyboardInterrupt:
        return _fail_once("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as head, has gone; closing stderr silences the interpreter's own complaint.
        sys.stderr.close()
        return 1
    except Exception as error:
        if (lacking := needs(_command_in(arguments), error)) is not None:
            return _fail_once(lacking, 2)
        # Last resort at the edge of the program: any other exception is a bug of ours, and the message says so.
        if debug:
            _print_traceback()
        return _fail(f"unexpected {type(error).__name__}: {error} (run with --debug for the traceback)", 1)


def _lacks_command(arguments: list[str]) -> bool:
    """Whether a command line ends at a group, which can only print its help."""
    _, apps, rest = program().parse_commands(arguments)
    return not rest and apps[-1].default_command is None


def _command_in(arguments: list[str]) -> str:
    """The command that a command line names, for messages."""
    try:
        return " ".join(["ropewalk", *program().parse_commands(arguments)[0]])
    except ImportError:
        # The command's own module needs what is not installed.
        return " ".join(["ropewalk", *arguments[:1]])


def _fail_once(message: str, status: int) -> int:
    """Print an error that every process of a run finds, from the first process only."""
    # torchrun sets RANK; without it there is one process.
    return _fail(message, status) if os.environ.get("RANK", "0") == "0" else status


def _fail(message: str, status: int) -> int:
    """Print an error as one line, whatever the names and library messages in it contain."""
    from ropewalk.cli.output import Terminal
    from ropewalk.io.urls import masked
    from ropewalk.reporting.shown_text import between_words, shown

    line = f"error: {shown(masked(' '.join(message.split())), MOST_OF_A_MESSAGE)}"
    console = Terminal(stderr=True)
    console.print(between_words(line, console), soft_wrap=True)
    return status


def _print_traceback() -> None:
    from ropewalk.io.urls import masked
    from ropewalk.reporting.shown_text import harmless

    print(harmless(masked(traceback.format_exc())), end="", file=sys.stderr)


def run() -> None:
    """Entry point of the ``ropewalk`` script."""
    try:
        status = main()
    except KeyboardInterrupt:
        # Ctrl-C while the commands themselves were imported.
        status = _fail_once("interrupted: nothing has started yet", INTERRUPTED)
    # Nothing is left to end in order, and a signal during the interpreter's shutdown must not change the status.
    ignore_signals()
    if status and "RANK" in os.environ:
        # One of several processes: threads that still talk to the others would abort a normal interpreter shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
