"""``engine: auto`` on a GPU: before a stage, the engines that can run it are timed on its first rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ropewalk.attention.api import KERNELS, attend
from ropewalk.attention.choices import ENGINES, EngineName
from ropewalk.attention.engines.capabilities import why_not
from ropewalk.attention.flash import Flash, installed_flash
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.measuring import (
    Candidate,
    LayersAlike,
    Measured,
    fastest,
    measure,
    shortened,
)
from ropewalk.attention.options import AttentionOptions
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_json
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.read import read_config
from ropewalk.models.load import attention_spec
from ropewalk.parallel import ShardedLayouts, sharded_attend
from ropewalk.training.resolved import AtStage, ResolvedRecipe, share_of_step

CHOICES = "engine-choices.json"
"""File in the run's folder with the engines that ``auto`` has chosen."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a stage, and the measurement that chose it.

    Attributes:
        stage: index of the stage, counted from 0.
        engine: the fastest engine.
        flash: implementation of FlashAttention that is active while the stage trains.
        measured_on: GPU, software, rows, model and processes of the measurement. If any of them differs when the run
            is resumed, it is made again.
        results: for each candidate its name, the milliseconds of forward and backward in all layers, and the reason if
            it cannot be taken.
    """

    stage: int
    engine: EngineName
    flash: Flash
    measured_on: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]

    def summary(self) -> dict[str, Any]:
        """The choice for ``summary.json``: engine and times."""
        return {"name": self.engine, "flash": self.flash, "measured": list(self.results)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineChoice:
        """Read a choice; raises ValueError, TypeError or KeyError if it is none."""
        choice = cls(**values)
        if (
            choice.engine not in ENGINES
            or choice.flash not in get_args(Flash)
            or type(choice.stage) is not int
        ):
            raise ValueError(f"stage {choice.stage!r} has the engine {choice.engine!r} with {choice.flash!r}")
        return choice


def measures_engine(resolved: ResolvedRecipe, number: int) -> bool:
    """Whether the engine of a stage is measured: ``engine: auto`` on a GPU, in a stage that trains."""
    on_gpu = resolved.device.type == "cuda"
    return resolved.recipe.engine == "auto" and on_gpu and resolved.recipe.stages[number].steps > 0


def engine_of_stage(number: int, at: AtStage) -> EngineChoice:
    """The engine that ``auto`` takes for a stage; every rank must call this function, and all take the same.

    A choice that the run has recorded is taken again, so that a resumed run computes the same, unless the hardware or
    anything else that was measured has changed.

    Args:
        number: index of the stage, counted from 0.
        at: state of the run at the stage, with its rows.

    Raises:
        RopewalkError: if the record of earlier choices is damaged, or no engine can be taken.
    """
    world, reporter = at.context.world, at.context.rank_0_reporter
    here = at.resolved.stages[number]
    config = read_config(at.resolved.model, at.resolved.recipe.trust_remote_code).lifted(
        at.resolved.recipe.lift
    )
    dtype = torch.float32 if here.precision == "float32" else torch.bfloat16
    layers = layers_alike(config)
    candidates = world.on_rank_0(
        lambda: candidates_for(
            config, at.resolved.device, dtype, here.mesh.ring > 1, here.settings.stage.keep_attention is True
        )
    )
    layouts = _first_rows(number, at, layers)
    measured_on = world.on_rank_0(lambda: _measured_on(at, number, layouts, candidates, dtype))
    kept = world.on_rank_0(lambda: choices_in(at.output).get(number))
    label = f"stage {number + 1}"
    if kept is not None and kept.measured_on == measured_on:
        reporter.note(f"{label}: attention engine {_name(kept)} (auto), as measured when the stage began")
        return kept
    if kept is not None:
        changed = sorted(key for key, value in measured_on.items() if kept.measured_on.get(key) != value)
        differences = (f"{key} was {kept.measured_on.get(key)} and is {measured_on[key]}" for key in changed)
        reporter.note(f"{label}: attention engines are measured again: {'; '.join(differences)}")
    own = _measured(at, layouts, layers, candidates, dtype)
    # Graphs for the shapes of the measurement: with them torch would compile those of the stage for any shape.
    torch.compiler.reset()
    # The slowest rank sets the pace, and an engine that fails on one rank fails the run.
    of_ranks = world.gather(own)
    together = [_slowest(each) for each in zip(*of_ranks, strict=True)]
    best = fastest(together)
    choice = EngineChoice(
        number,
        best.candidate.engine,
        best.candidate.flash,
        measured_on,
        [_result(each) for each in together],
    )
    reporter.note(f"{label}: {describe(choice)}")
    world.on_rank_0(lambda: _write(choice, at.output))
    return choice


def _write(choice: EngineChoice, output: Path) -> None:
    choices = {**choices_in(output), choice.stage: choice}
    write_json(output / CHOICES, [asdict(each) for _, each in sorted(choices.items())])


def layers_alike(config: ModelConfig) -> list[LayersAlike]:
    """The model's layers with attention, by shape."""
    kv_heads = config.num_kv_heads
    assert kv_heads is not None
    found = Counter(
        (heads, kv_heads, each.key_dim, each.value_dim, each.locality, each.softcap, each.sinks)
        for heads, each in zip(config.heads_of_layers, config.layers, strict=True)
        if each.attends
    )
    return [LayersAlike(layers, *shape) for shape, layers in found.items()]


def candidates_for(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ring: bool = False,
    keeps_attention: bool = False,
) -> list[Candidate]:
    """The engines that can run a model, ``varlen`` with each implementation of FlashAttention that is installed.

    With ``keeps_attention``, those whose results a checkpointed layer can keep.
    """
    spec = attention_spec(config, device, dtype, ring=ring)
    wanted = KERNELS if keeps_attention else [engine for engine in ENGINES if engine != "reference"]
    able = [engine for engine in wanted if why_not(engine, spec) is None]
    flashes = installed_flash(spec.gpu[0]) if device.type == "cuda" else []
    others = [Candidate("varlen", flash) for flash in flashes if flash != "FA2" and "varlen" in able]
    return [*(Candidate(engine) for engine in able), *others]


def choices_in(output: Path) -> dict[int, EngineChoice]:
    """Choices that a run has recorded so far, by index of the stage.

    Raises:
        RopewalkError: if the file is damaged.
    """
    path = output / CHOICES
    if not path.is_file():
        return {}
    try:
        choices = [EngineChoice.from_json(each) for each in parse_json(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RopewalkError(
            f"{path} is damaged ({error}); delete the file, and the engines are measured again"
        ) from error
    return {each.stage: each for each in choices}


def describe(choice: EngineChoice) -> str:
    """One sentence: the engine that was chosen, the kernel that it runs, and the time of each candidate."""
    timed = sorted((each for each in choice.results if each["ms"] is not None), key=lambda each: each["ms"])
    parts = [f"{each['name']} {each['ms']:,.1f} ms" for each in timed]
    parts += [f"{each['name']} not taken: {each['refusal']}" for each in choice.results if each["ms"] is None]
    tokens, gpu = choice.measured_on["tokens"], choice.measured_on["gpu"]
    return (
        f"attention engine {_name(choice)} (auto), the fastest in forward and backward of all layers over {tokens:,} "
        f"tokens of its first rows on {gpu}: {', '.join(parts)}"
    )


def _name(choice: EngineChoice) -> str:
    names = (
        str(each["name"])
        for each in choice.results
        if (each["engine"], each["flash"]) == (choice.engine, choice.flash)
    )
    return next(names, choice.engine)


def _result(measured: Measured) -> dict[str, Any]:
    engine = measured.candidate.engine
    kernels = " and ".join(measured.kernels)
    return {
        "engine": engine,
        "flash": measured.candidate.flash,
        "name": f"{engine} ({kernels})" if kernels else engine,
        "ms": None if measured.seconds is None else measured.seconds * 1000,
        "refusal": measured.refusal,
    }


def _slowest(of_ranks: Sequence[Measured]) -> Measured:
    """The result of the rank that failed, or else of the slowest."""
    return max(of_ranks, key=lambda each: (each.seconds is None, each.seconds or 0.0))


def _first_rows(number: int, at: AtStage, layers: Sequence[LayersAlike]) -> list[PackedLayout]:
    """Layouts of the rows of this rank's first micro-batch, cut to what is measured, and of equal length everywhere."""
    here, rows = at.resolved.stages[number], at.training_rows(number)
    stage = here.settings.stage
    wanted = rows.of_step(0, stage.rows_per_step, here.settings.seed)
    mine = share_of_step(wanted, at.context)[: stage.rows_per_batch]
    layouts = shortened([rows.read(each).layout for each in mine], layers, here.mesh.sequence_degree)
    # Rows of other ranks may need more operations, and ranks must exchange equal lengths.
    tokens = min(at.context.world.gather(layouts[0].total_length))
    return [each.first(tokens) for each in layouts]


def _measured_on(
    at: AtStage,
    number: int,
    layouts: Sequence[PackedLayout],
    candidates: Sequence[Candidate],
    dtype: torch.dtype,
) -> dict[str, Any]:
    device = at.resolved.device
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "candidates": [f"{each.engine} {each.flash}" for each in candidates],
        "rows": len(layouts),
        "tokens": layouts[0].total_length,
        "dtype": str(dtype).removeprefix("torch."),
        "processes": str(at.resolved.stages[number].mesh),
    }


def _measured(
    at: AtStage,
    layouts: Sequence[PackedLayout],
    layers: Sequence[LayersAlike],
    candidates: Sequence[Candidate],
    dtype: torch.dtype,
) -> list[Measured]:
    mesh, device = at.context.mesh, at.resolved.device
    if mesh is None or mesh.shape.sequence_degree == 1:

        def whole(q: Tensor, k: Tensor, v: Tensor, engine: EngineName, options: AttentionOptions) -> Tensor:
            return attend(q, k, v, layouts, engine, options)

        return measure(candidates, layers, layouts, layouts[0].total_length, whole, dtype, device)
    sharded = ShardedLayouts.of(layouts, mesh.groups)

    def of_ranks(q: Tensor, k: Tensor, v: Tensor, engine: EngineName, options: AttentionOptions) -> Tensor:
        return sharded_attend(q, k, v, sharded, engine, options)

    return measure(candidates, layers, layouts, sharded.shard_length, of_ranks, dtype, device)
