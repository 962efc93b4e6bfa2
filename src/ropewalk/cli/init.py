"""``ropewalk init``: write a commented recipe that fits the model, the documents and the machine."""

from __future__ import annotations

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, print_json, results, run_context
from ropewalk.dry_run.settings import InitSettings


def init(settings: InitSettings, *, as_json: JsonFlag = False) -> None:
    """Write a recipe (a YAML file with the settings of a training run) for a model, documents and a machine.

    Reads the model's config, its tokenizer and the first documents, and runs a step of each stage without data or GPU.
    Trains nothing and downloads no weights. Comments in the recipe give the reasons for its values.
    """
    from ropewalk.dry_run.init import propose

    found = propose(settings, run_context())
    if as_json:
        print_json(found.to_json())
        return
    for line in found.statement():
        # Commands and paths stay whole, to be copied.
        (results().say if line.startswith(("recipe ", "next ")) else results().prose)(line)


app = make_command(
    init, "init", "ropewalk init meta-llama/Llama-3.1-8B --documents books/ --target 512k --out books.yaml"
)
