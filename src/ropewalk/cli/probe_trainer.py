"""``ropewalk probe-trainer``: check in anybody's trainer that documents, loss, RoPE and windows are right."""

from __future__ import annotations

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, run_context, show_result
from ropewalk.errors import RunFailure
from ropewalk.verification.settings import TrainerProbeSettings


def probe_trainer(settings: TrainerProbeSettings, *, as_json: JsonFlag = False) -> None:
    """Test a trainer for attention between documents, wrong labels, wrong loss averages, wrong RoPE and wrong sliding
    windows.

    Runs one step of the trainer on generated documents. Then changes one token at a time, to see which other tokens
    this affects.

    With several processes: torchrun --nproc-per-node 2 -m ropewalk probe-trainer train.py:make_trainer
    """
    from ropewalk.parallel import joined
    from ropewalk.reporting.verification import describe_trainer_probe
    from ropewalk.verification.trainers.probe import probe_trainer as run

    with joined() as world:
        result = run(settings, run_context(world))
        if not world.is_rank_0:
            return
    show_result(result, as_json, describe_trainer_probe)
    if result.failed:
        failed = f"{len(result.failed)} of {len(result.checks)} checks failed"
        raise RunFailure(f"{failed}: {', '.join(map(repr, result.failed))}")


app = make_command(
    probe_trainer, "probe-trainer", "ropewalk probe-trainer train.py:make_trainer --length 64 --json"
)
