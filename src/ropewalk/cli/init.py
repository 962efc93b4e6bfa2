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
    from ropewalk.dry_run.facts import gpus_of
    from ropewalk.dry_run.init import propose

    found = propose(settings, run_context())
    if as_json:
        print_json(found.to_json())
        return
    documents, machine = found.documents, found.machine
    data = "none"
    if documents is not None:
        seen = f"{documents.read:,}{'' if documents.complete else ' and more'}"
        data = f"{seen} documents, about {documents.tokens:,} tokens"
    here = f"{machine.cores} cores, {machine.memory_bytes / 1e9:,.1f} GB of memory, "
    gpus = f"{gpus_of(machine)} of {machine.gpu_bytes / 1e9:g} GB" if machine.gpus else "no GPU"
    for name, value in (
        ("recipe", str(found.out)),
        ("data", data),
        ("machine", gpus if machine.named else f"{here}{gpus}"),
        *([("tokens", ", ".join(map(str, found.tokens)))] if found.tokens else []),
        *([("adapter", found.adapter)] if found.adapter else []),
        *((f"stage {number}", line) for number, line in enumerate(found.stages, start=1)),
        *(("sources", line) for line in found.remarks),
        *(("missing", line) for line in found.missing),
        *(("warning", line) for line in found.warnings),
        ("next", found.next_commands),
    ):
        line = f"{name:8} {value}"
        # Commands and paths stay whole, to be copied.
        (results().say if name in ("recipe", "next") else results().prose)(line)


app = make_command(
    init, "init", "ropewalk init meta-llama/Llama-3.1-8B --documents books/ --target 512k --out books.yaml"
)
