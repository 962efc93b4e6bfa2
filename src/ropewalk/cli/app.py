"""The command line: parse, call, print. Every command lives in the module of its name beside this one."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from functools import cache

from cyclopts import App

from ropewalk.cli.binding import HELP_FLAGS, UsageError, UsageErrors, usage_sentence
from ropewalk.errors import Echo, RopewalkError, RunFailure
from ropewalk.versions import VERSION

INTERRUPTED = 130
MOST_OF_A_MESSAGE = 2000
"""Characters of an error that are printed: it may repeat a value that fills a file."""

SUMMARIES = {
    "inspect": "Show a checkpoint's RoPE and how far it reaches; with --target, what that length needs.",
    "models": "Show which families of models are supported, and why others are not.",
    "rope": "RoPE arithmetic: bounds, bases, frequencies, plans, and a probe on a checkpoint.",
    "audit": "Measure how far arithmetic breaks relative positions in a model, which step does it, and what "
    "mitigates it.",
    "data": "Pack documents into rows, and look at them.",
    "search": "Search rescale factors (LongRoPE) for a longer context; show and import tables of them.",
    "extend": "Extend a model's context: measure, change RoPE, train, measure again, save.",
    "export": "Write a checkpoint with a factor table in its config, as longrope, and the weights as they are.",
    "eval": "Measure a checkpoint on long-context and short-context benchmarks, with 95 % confidence intervals.",
    "verify": "Verify on your model and documents that packing, ranks, checkpoints and RoPE change no number.",
}
"""One line on each command, in the order of the help; it is there before the command's module is."""


class _Remarks(logging.Handler):
    """What the library logs, on stderr as the commands' own remarks are."""

    def emit(self, record: logging.LogRecord) -> None:
        from ropewalk.cli.output import notes

        notes.say(record.getMessage())


_REMARKS = _Remarks(logging.WARNING)


def quiet_libraries() -> None:
    """One line a fact: no library's progress bars or advice between our lines."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


@cache
def program() -> App:
    """The whole program; a command's module is imported when the command is asked for."""
    app = App(
        name="ropewalk",
        help="Make the context window of RoPE language models longer. (--debug anywhere shows a traceback.)",
        version=f"ropewalk {VERSION}",
        version_flags="--version",
        help_flags=HELP_FLAGS,
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for place, (name, summary) in enumerate(SUMMARIES.items()):
        app.command(f"ropewalk.cli.{name}:app", name=name, help=summary, sort_key=place)
    app.register_install_completion_command(help="Install completion for the shell that is running.")
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    from ropewalk.cli.output import Interrupted, notes, results

    quiet_libraries()
    logging.getLogger("ropewalk").addHandler(_REMARKS)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if _lacks_command(arguments):
            program()(arguments, console=notes)
            return 2
        program()(arguments, console=results())
        return 0
    except Interrupted as error:
        return _fail_once(f"interrupted: {error}", INTERRUPTED)
    except Echo as error:
        # The first of several processes says it.
        return 1 if error.failed else 2
    except UsageError as error:
        return _fail_once(f"{error} (see {_command_in(arguments)} --help)", 2)
    except UsageErrors as error:
        return _fail_once(f"{usage_sentence(error)} (see {_command_in(arguments)} --help)", 2)
    except RopewalkError as error:
        if debug:
            _print_traceback()
        return _fail(str(error), 1 if isinstance(error, RunFailure) else 2)
    except KeyboardInterrupt:
        return _fail_once("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        # The last resort at the edge of the program: anything else is our defect, and says so.
        if debug:
            _print_traceback()
        return _fail(f"unexpected {type(error).__name__}: {error} (run with --debug for the traceback)", 1)


def _lacks_command(arguments: list[str]) -> bool:
    """Whether a command line ends at a group, whose help is all that it can do."""
    _, apps, rest = program().parse_commands(arguments)
    return not rest and apps[-1].default_command is None


def _command_in(arguments: list[str]) -> str:
    """The command that a command line names, for the hint at its help."""
    return " ".join(["ropewalk", *program().parse_commands(arguments)[0]])


def _fail_once(message: str, status: int) -> int:
    """What every process of a run finds by itself, said by the first."""
    return _fail(message, status) if os.environ.get("RANK", "0") == "0" else status


def _fail(message: str, status: int) -> int:
    """Say an error in one line, whatever is in the names and the libraries' words that it repeats."""
    from ropewalk.reporting.shown_text import shown

    print(f"error: {shown(' '.join(message.split()), MOST_OF_A_MESSAGE)}", file=sys.stderr)
    return status


def _print_traceback() -> None:
    from ropewalk.reporting.shown_text import harmless

    print(harmless(traceback.format_exc()), end="", file=sys.stderr)


def run() -> None:
    """Entry point of the ``ropewalk`` script."""
    try:
        status = main()
    except KeyboardInterrupt:
        # While the commands themselves were imported.
        status = _fail_once("interrupted: nothing has begun yet", INTERRUPTED)
    if status and "RANK" in os.environ:
        # One of several processes: threads that still talk to the others would abort the interpreter's own end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
