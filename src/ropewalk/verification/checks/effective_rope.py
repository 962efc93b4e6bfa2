"""Check the angles that a model's rotary module applies in a forward pass against the recipe's RoPE method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention.layout import IGNORED, PackedLayout
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.config.auto_class import plain_model
from ropewalk.models.config.read import read_config
from ropewalk.models.load import cast_parameters, configured, load_model
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.parallel import Mesh, World
from ropewalk.rope import Default, RopeMethod, RotaryEmbedding
from ropewalk.training.checkpoint.sharded import export_model
from ropewalk.verification.case import Case
from ropewalk.verification.checks import Claim, own_mesh
from ropewalk.verification.computing import load_on, once_together
from ropewalk.verification.result import Outcome

TOKENS = 32
"""Number of probed positions, spread over the whole context."""
NEAR = 3
"""Number of leading positions to probe; they reveal the frequencies, because no pair has completed a turn yet."""


@dataclass(frozen=True, eq=False)
class Applied:
    """Output of a rotary module for the layers of one type in one forward pass.

    Attributes:
        cos, sin: float64 ``[tokens, rotary_dim / 2]``.
        dtype: dtype in which the module returned them.
        exact: whether it is ropewalk's own module.
    """

    cos: Tensor
    sin: Tensor
    dtype: torch.dtype
    exact: bool


ByLayerType = Mapping[str | None, Applied]
"""Output by layer type; the key is None if all layers share one RoPE."""


def rope_as_loaded(case: Case) -> Outcome:
    """Check RoPE after loading the model and casting it for the precision, as a run does."""
    dtype = case.attention.dtype
    # In float32 first, because the cast that follows is a step that can round the frequencies.
    model = load_model(case.model, replace(case.setup, engine="auto"), torch.float32, case.device)
    if case.precision == "bfloat16":
        cast_parameters(model, dtype)
    return _held(case, {f"in {str(dtype).removeprefix('torch.')}": _in_row(case, _losses(model))})


def rope_after_wrapping(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Check RoPE of the sharded model, whose parameters are gathered in the dtype of the recipe's precision."""
    compute = torch.bfloat16 if case.precision == "bfloat16" else None
    applied = _in_row(case, load_on(case, mesh, world, torch.float32, compute))
    return _held(case, {f"sharded over {mesh.shape}": applied})


def rope_after_reload(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Check RoPE of the saved folder, once loaded by ropewalk and once by transformers."""
    folder = saved_folder(case, mesh, world)
    if not world.is_rank_0:
        return Outcome.not_run("")
    # Without RoPE or context from the recipe: the saved config alone must give them.
    setup = replace(case.setup, rope=None, max_position_embeddings=None, engine="auto")
    ours = load_model(folder, setup, torch.float32, case.device)
    found = {"loaded by ropewalk": _in_row(case, _losses(ours))}
    plain = (
        plain_model(folder, dtype=torch.float32, trust_remote_code=case.setup.trust_remote_code)
        .to(case.device)
        .eval()
    )
    ids, positions = _probe(case)

    def run() -> None:
        where = plain.device
        mask = torch.ones(1, len(ids), dtype=torch.int64, device=where)
        plain(
            ids[None].to(where), position_ids=positions[None].to(where), attention_mask=mask, use_cache=False
        )

    found["loaded by transformers"] = captured(plain, run)
    return _held(case, found)


def saved_folder(case: Case, mesh: Mesh, world: World) -> Path:
    """Export the model with the recipe's RoPE from its shards, as a run exports its result; cached per case."""

    def save() -> Path:
        dtype = getattr(torch, read_config(case.model, case.setup.trust_remote_code).dtype or "float32")
        folder = Path(case.scratch) / f"saved-{case.key}"
        model = load_on(case, mesh, world, torch.float32)
        export_model(model, folder, None, world, dtype)
        return folder

    return once_together(case, world, "saved", save)


def _losses(model: Any) -> LossModel:
    return LossModel(model, OutputHead.unchecked(model))


def _probe(case: Case) -> tuple[Tensor, Tensor]:
    """Token ids and positions of the probe: the first few positions, and others up to the end of the context."""
    far = torch.linspace(NEAR, case.context - 1, TOKENS - NEAR).long()
    positions = torch.cat([torch.arange(NEAR), far]).unique()
    # Any tokens will do, because the angles depend on positions alone.
    return case.rows[0].input_ids[: len(positions)], positions


def _in_row(case: Case, model: LossModel) -> ByLayerType:
    """Angles in the forward call of training, with a layout that has the positions of the probe."""
    ids, positions = _probe(case)
    ends = torch.tensor([0, len(ids)], dtype=torch.int32)
    layout = PackedLayout(ends, torch.zeros(1, dtype=torch.int32), positions, 0, "full")
    device = model.device
    labels = torch.full_like(ids, IGNORED)
    return captured(model.model, lambda: model(ids[None].to(device), labels[None].to(device), (layout,)))


def captured(model: Any, run: Callable[[], object]) -> ByLayerType:
    """Capture the rotary module's output for each layer type of the model."""
    rotary = rotary_module(model)[2]
    outputs: dict[str | None, Any] = {}

    def keep(module: Any, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        # Models pass the layer type by name, as the third argument, or not at all.
        outputs[named.get("layer_type", args[2] if len(args) > 2 else None)] = output

    handle = rotary.register_forward_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    exact = isinstance(rotary, RotaryEmbedding)
    found = {kind: cos_sin_of(output) for kind, output in outputs.items()}
    return {kind: Applied(cos.double(), sin.double(), cos.dtype, exact) for kind, (cos, sin) in found.items()}


def cos_sin_of(output: Any) -> tuple[Tensor, Tensor]:
    """Convert the module's output, in any rotary style, to cos and sin of ``[tokens, rotary_dim / 2]``."""
    # Llama 4's rotary module returns complex numbers, cos + i sin.
    if isinstance(output, Tensor):
        return output[0].real.cpu(), output[0].imag.cpu()
    cos, sin = (_one_of_pair(part[0].cpu()) for part in output)
    return cos, sin


def _one_of_pair(given: Tensor) -> Tensor:
    """Each pair once; a module that gives it once has neighbours and halves that differ, as frequencies do."""
    half = given.shape[-1] // 2
    if torch.equal(given[..., :half], given[..., half:]):
        return given[..., :half]
    return given[..., 0::2] if torch.equal(given[..., 0::2], given[..., 1::2]) else given


def _held(case: Case, found: Mapping[str, ByLayerType]) -> Outcome:
    """Outcome for the recipe's methods at the positions of the probe."""
    methods = configured(case.model, case.setup)[1]
    return angles_outcome(found, methods, _probe(case)[1], case.context, "recipe")


def angles_outcome(
    found: Mapping[str, ByLayerType],
    methods: Mapping[str | None, RopeMethod],
    positions: Tensor,
    length: int,
    source: str,
) -> Outcome:
    """Outcome for the angle whose error is largest relative to its rounding budget.

    Args:
        found: what a rotary module returned, by the place or the time at which it was read.
        methods: the expected RoPE method of each layer type; the key is None if all layers share one.
        positions: int64 ``[tokens]``, the positions that the module was given; 0 and 1 are the first two.
        length: tokens of the context, for methods whose frequencies depend on it.
        source: what states the methods, such as ``recipe``.
    """
    shares = []
    for where, each in found.items():
        for kind, applied in each.items():
            method = methods[kind if kind in methods else None]
            place = where if None in methods else f"{where}, in layers of type {kind},"
            inv_freq, factor = method.frequencies(length)
            angles = positions.double()[:, None] * inv_freq
            if applied.cos.shape != angles.shape:
                pairs = (
                    f"{place} the model rotates {applied.cos.shape[-1]} pairs of dimensions, but the {source}'s RoPE "
                    f"has {angles.shape[-1]}"
                )
                return Outcome(math.inf, 0.0, False, pairs)
            error, budget = _angle_errors(applied, angles, inv_freq, factor)
            worst = int((error / budget).nan_to_num(nan=math.inf).argmax())
            share = float(error.flatten()[worst]), float(budget.flatten()[worst])
            shares.append((share, place, method, applied))
    (error_there, budget_there), place, method, applied = max(
        shares, key=lambda each: each[0][0] / each[0][1]
    )
    kinds = list(dict.fromkeys(str(kind) for each in found.values() for kind in each if None not in methods))
    return Outcome.within(
        error_there,
        budget_there,
        f"angles up to position {length - 1:,}, in rad; {' and '.join([*found, *kinds])}",
        f"{place} the model's RoPE angles are not those of the {source}'s {_described(method)}: "
        f"{_likely(method.frequencies(length).inv_freq, applied)}",
    )


def _angle_errors(applied: Applied, angles: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Error of each angle, and the part that rounding explains, both in rad.

    The error is the larger of the error of the angle and the relative error of the norm of (cos, sin), which is the
    attention factor. cos and sin are rounded to their dtype. The module of transformers also computes in float32: the
    frequency is a power of theta, whose relative error grows with its logarithm. It is rounded again as a power, for
    longrope in a product with a rounded factor, as a reciprocal, and in the product with the position: six units of
    half an epsilon.
    """
    turn = 2 * math.pi
    # Angles differ modulo a turn; centred on zero, so that an error just below a full turn counts as small.
    angle = torch.remainder(torch.atan2(applied.sin, applied.cos) - angles + math.pi, turn) - math.pi
    length = torch.hypot(applied.cos, applied.sin) / factor - 1
    error = torch.maximum(angle.abs(), length.abs())
    budget = torch.full_like(angles, torch.finfo(applied.dtype).eps)
    # A stock module multiplies float32 frequencies by positions, so its angles lose relative, not absolute, precision.
    if not applied.exact:
        budget = budget + angles * torch.finfo(torch.float32).eps * (
            3 + inv_freq.where(inv_freq > 0, 1).log().abs()
        )
    return error, budget


def _described(method: RopeMethod) -> str:
    return f"{method.name}, rope_theta {method.rope_theta:,.0f}"


def _likely(inv_freq: Tensor, applied: Applied) -> str:
    """Probable cause of wrong angles, guessed from the frequencies, which are the angles at position 1."""
    # The probe's second position is 1, where the angle is the frequency itself.
    held = torch.atan2(applied.sin[1], applied.cos[1])
    unit = 8 * torch.finfo(applied.dtype).eps
    if bool(((held - inv_freq.bfloat16().double()).abs() <= unit * inv_freq).all()):
        return "its inv_freq is rounded to bfloat16"
    slowest = len(inv_freq) - 1
    # Unscaled, the slowest of n pairs has theta^(-(n - 1) / n), which is solved for theta here.
    theta = float(held[slowest].clamp_min(1e-12)) ** (-len(inv_freq) / max(1, slowest))
    plain = Default(2 * len(inv_freq), theta) if 1 < theta < 1e12 else None
    if plain is not None and bool(((held - plain.frequencies()[0]).abs() <= 1e-3 * held.abs()).all()):
        return f"it runs unscaled RoPE with rope_theta {theta:,.0f}"
    worst = int(((held - inv_freq).abs() / inv_freq.where(inv_freq > 0, 1)).argmax())
    return f"inv_freq of pair {worst} is {float(held[worst]):.6g} rad/token and should be {float(inv_freq[worst]):.6g}"


ANGLES = "angles applied with the recipe's method in float64"

CLAIMS = (
    Claim("rope", 40, "RoPE as loaded", ANGLES, rope_as_loaded),
    Claim("wrapped rope", 90, "RoPE after sharding", ANGLES, rope_after_wrapping, own_mesh),
    Claim("saved rope", 130, "RoPE after save and load", ANGLES, rope_after_reload, own_mesh),
)
