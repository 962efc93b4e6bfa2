"""``ropewalk verify``: verify on the user's model and documents that nothing in the training path changes results."""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, ended_by_sigterm, results, run_context, show_result
from ropewalk.errors import RunFailure
from ropewalk.io.settings import COMMON, OutputFile, Settings
from ropewalk.verification.settings import VerifySettings


class VerifyOutput(Settings):
    """Output options: the file of results and JSON."""

    group: ClassVar[str | None] = COMMON.group

    out: OutputFile | None = Field(default=None, description="File to write the result to, as JSON.")
    as_json: JsonFlag = False


def verify(settings: VerifySettings, output: VerifyOutput) -> None:
    """Verify that packing, parallelism, and saving and resuming do not change your model's results, and that the
    model applies the recipe's RoPE.

    With the processes that a run will use: torchrun --nproc-per-node 4 -m ropewalk verify recipe.yaml
    """
    from ropewalk.io.files import write_json
    from ropewalk.parallel import joined
    from ropewalk.reporting.verification import describe_verification
    from ropewalk.verification import verify as run

    out = output.out
    with joined() as world:
        # Under torchrun, `joined` handles SIGTERM.
        with ended_by_sigterm("verify") if world.size == 1 else nullcontext():
            result = run(settings, run_context(world))
        if not world.is_rank_0:
            return
    if out is not None:
        write_json(out, result.to_json())
    show_result(result, output.as_json, describe_verification)
    if out is not None and not output.as_json:
        results().say(str(out))
    if result.failed:
        failed = f"{len(result.failed)} of {len(result.checks)} checks failed"
        raise RunFailure(f"{failed}: {', '.join(map(repr, result.failed))}")


app = make_command(verify, "verify", "ropewalk verify recipe.yaml --layers 2 --length 4k --out verify.json")
