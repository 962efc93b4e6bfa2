"""Checks of options that contradict each other or the number of processes, and the mesh that --parallel asks for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.serving import OF_WORDS
from ropewalk.evaluation.settings import OWN, EvaluationSettings, Settings, unread
from ropewalk.evaluation.tasks.ruler.tasks import RulerSettings
from ropewalk.io.settings import Option

if TYPE_CHECKING:
    from ropewalk.parallel import MeshShape


def check_together(config: EvaluationSettings, processes: int) -> None:
    """Raise for settings that contradict each other or the number of processes.

    Args:
        config: settings of the run.
        processes: number of processes that torchrun started; 1 without torchrun.
    """
    if config.serving is None and config.model is None:
        raise RopewalkError("MODEL is missing; name a checkpoint, or a server with --server URL")
    _check_words(config)
    if config.serving is not None and config.average:
        raise RopewalkError(
            "--average measures several checkpoints, but a server runs only one; remove --average or --server"
        )
    if config.serving is not None and config.loading.rope is not None:
        raise RopewalkError(
            f"--rope {config.loading.rope} has no effect on a server, which uses the factors in its own checkpoint; "
            "serve a checkpoint that ropewalk export wrote with these factors, or remove --server"
        )
    if config.serving is not None and config.serving.endpoint == "chat" and not config.what.chat:
        raise RopewalkError(
            "--endpoint chat needs --chat: the tokens of a prompt are counted with the tokenizer's chat template"
        )
    _check_effect(config.what)
    shape = None if config.parallel is None else degrees_in(config.parallel)
    if processes == 1:
        if shape is not None:
            raise RopewalkError(
                f"--parallel {config.parallel} needs several processes; start them with "
                f"{torchrun_line(shape.world_size, str(config.parallel))}"
            )
        return
    from ropewalk.models.load import choose_device

    for option, given in (("--average", config.average), ("--server", config.serving is not None)):
        if given:
            raise RopewalkError(
                f"{option} needs a single process, but torchrun started {processes}; run the command without torchrun"
            )
    if choose_device(config.loading.device).index is not None:
        raise RopewalkError(
            f"--device {config.loading.device} names a single device for {processes} processes; give --device cuda"
        )


def _check_words(config: EvaluationSettings) -> None:
    """Raise for settings that need the tokens of a prompt, if they are only estimated."""
    if config.serving is None or config.serving.tokenizer != OF_WORDS:
        return
    exact = {
        "--send ids": config.serving.send == "ids",
        "--compat nvidia": config.what.of(RulerSettings).compat == "nvidia",
    }
    for option, given in exact.items():
        if given:
            raise RopewalkError(
                f"{option} needs the tokens of prompts, and --tokenizer {OF_WORDS} only estimates their number; remove "
                "one of the two"
            )


def _check_effect(settings: Settings) -> None:
    """Raise for settings that only suites read which do not run."""
    # The settings as models; model_dump() would make them dicts.
    values = dict(settings)
    for name, setting, readers in unread(values, settings.suites):
        value = getattr(values[name], setting)
        value_text = ",".join(map(str, value)) if isinstance(value, tuple | dict) else value
        raise RopewalkError(
            f"{option_name(OWN[name], setting)} {value_text} has no effect without the suite {' or '.join(readers)}; "
            f"add {'one of these suites' if len(readers) > 1 else 'the suite'} to --suite, or remove the option"
        )


def option_name(kind: type[BaseModel], field: str) -> str:
    """Return the command-line option of a setting, such as ``--short-context``."""
    names = [
        each.name for each in kind.model_fields[field].metadata if isinstance(each, Option) and each.name
    ]
    return names[0] if names else f"--{field.replace('_', '-')}"


def torchrun_line(processes: int, parallel: str) -> str:
    """Return the torchrun command that starts this number of processes."""
    return f"torchrun --nproc-per-node {processes} -m ropewalk eval MODEL --parallel {parallel}"


def degrees_in(text: str) -> MeshShape:
    """Parse a mesh such as ``shard=2,sequence=4``; degrees that are not given are 1.

    Raises:
        RopewalkError: if a part is not KEY=DEGREE; the message quotes it.
    """
    from ropewalk.parallel import MeshShape
    from ropewalk.parallel.mesh import DIMENSIONS

    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, degree = (each.strip() for each in part.partition("="))
        # isdigit() alone accepts digits such as ², which int() refuses.
        number = degree.isascii() and degree.isdigit() and int(degree) >= 1
        if name not in DIMENSIONS or name in degrees or not number:
            raise RopewalkError(
                f"--parallel {text!r} contains {part.strip()!r}, but must be KEY=DEGREE pairs such as "
                f"shard=2,sequence=4; use each of the keys {', '.join(DIMENSIONS)} at most once, with "
                "degrees of 1 or more"
            )
        degrees[name] = int(degree)
    return MeshShape(**degrees)


def shape_for(parallel: str | None, processes: int, num_heads: int) -> MeshShape:
    """Return the requested mesh, or one with all processes in ``sequence``.

    Args:
        parallel: degrees, in the format of :func:`degrees_in`; None for the default.
        processes: number of processes that torchrun started.
        num_heads: number of query heads of the model.

    Raises:
        RopewalkError: if the product of the degrees is not the number of processes, or the number of heads is not
            divisible by the sequence degree.
    """
    from ropewalk.parallel import MeshShape

    shape = MeshShape(sequence=processes) if parallel is None else degrees_in(parallel)
    if shape.world_size != processes:
        raise RopewalkError(
            f"--parallel {parallel} needs {shape.world_size} processes, but torchrun started {processes}; run "
            f"{torchrun_line(shape.world_size, parallel or '')}"
        )
    if num_heads % shape.sequence:
        # The largest Ulysses degree that divides the heads; the remaining processes go to another dimension.
        sequence = math.gcd(num_heads, shape.sequence)
        rest = shape.world_size // sequence
        raise RopewalkError(
            f"the model's {num_heads} attention heads are not divisible by sequence={shape.sequence}; give either "
            f"--parallel ring={rest},sequence={sequence} or --parallel shard={rest},sequence={sequence}"
        )
    return shape
