"""Everything that can be refused before any work starts is refused here, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from ropewalk.attention import check_engine, resolve_engine
from ropewalk.data import PackingSettings, load_tokenizer, special_ids
from ropewalk.data.embedded import resolve_model
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation.passkey import passkey_samples
from ropewalk.integrations.models import choose_device, read_config, shortest_window, with_rope
from ropewalk.integrations.trackers import require_trackers
from ropewalk.rope import (
    Linear,
    MethodParameters,
    RopeMethod,
    Yarn,
    method_for_target,
    methods_from_config,
)
from ropewalk.training.recipe import Recipe, Rope, Stage


@dataclass(frozen=True)
class Plan:
    """A recipe whose every question is answered.

    Attributes:
        model: folder or hub id.
        trained_length: context of the checkpoint as it is, in tokens.
        dtype: dtype of the checkpoint's weights, in which the result is saved.
        methods: RoPE method of each stage.
        packing: packing settings of each stage.
        tokenizer: the model's tokenizer.
        device: where to train.
        precision: float32, bfloat16-autocast or bfloat16.
        engine: the attention engine that ``auto`` stands for.
    """

    model: str
    trained_length: int
    dtype: torch.dtype
    methods: tuple[RopeMethod, ...]
    packing: tuple[PackingSettings, ...]
    tokenizer: Any
    device: torch.device
    precision: str
    engine: str


def plan(recipe: Recipe) -> Plan:
    """Check a recipe against the checkpoint and the machine.

    Raises:
        RopewalkError: for the first thing that would fail later, with what would work instead.
    """
    model = resolve_model(recipe.model)
    config = read_config(model, recipe.trust_remote_code)
    text = config.get_text_config()
    trained_length = _trained_length(text)
    require_trackers(recipe.trackers)
    methods = _methods(recipe, methods_from_config(text.to_dict()), trained_length, text.model_type)
    for stage, method in zip(recipe.stages, methods, strict=True):
        with_rope(text, method, stage.context)
    dropout = getattr(text, "attention_dropout", None)
    if dropout:
        raise RopewalkError(
            f"the model has attention dropout {dropout}, which no engine has; set it to 0 in config.json"
        )
    device = choose_device(recipe.device)
    precision = recipe.precision
    if precision == "auto":
        precision = "bfloat16-autocast" if device.type == "cuda" else "float32"
    compute = torch.float32 if precision == "float32" else torch.bfloat16
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    softcap = getattr(text, "attn_logit_softcapping", None)
    window = shortest_window(text)
    for stage in recipe.stages:
        if window is not None and stage.context > window:
            raise EngineError(
                f"the model has layers with a sliding window of {window} tokens, shorter than the context of "
                f"{stage.context}: no engine combines a window with a layout; such a model cannot be extended yet"
            )
        check_engine(recipe.engine, device, compute, stage.context, head_dim=head_dim, softcap=softcap)
    tokenizer = load_tokenizer(model)
    special = special_ids(tokenizer)
    for length in recipe.evaluation.lengths or ():
        passkey_samples(tokenizer, length, recipe.evaluation.samples, recipe.seed)
    # A tokenizer that truncates at the old length would take the new context away again.
    tokenizer.model_max_length = max(tokenizer.model_max_length, recipe.stages[-1].context)
    if len(tokenizer) > text.vocab_size:
        raise RopewalkError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {text.vocab_size}: not a pair"
        )
    packing = tuple(_packing(recipe, stage) for stage in recipe.stages)
    for settings in packing:
        settings.bos_policy(special)
    engine = resolve_engine(device, compute, softcap, head_dim) if recipe.engine == "auto" else recipe.engine
    dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32
    return Plan(model, trained_length, dtype, methods, packing, tokenizer, device, precision, engine)


def _methods(
    recipe: Recipe, current: dict[str | None, RopeMethod], trained_length: int, model_type: str
) -> tuple[RopeMethod, ...]:
    if None not in current:
        raise RopewalkError(
            f"{model_type} has a RoPE of its own for each layer type ({', '.join(map(str, current))}); extending "
            "such a model is not supported"
        )
    method, length = current[None], trained_length
    methods = []
    for number, stage in enumerate(recipe.stages):
        if number == 0 and stage.context <= length:
            raise RopewalkError(
                f"stages.0.context {stage.context} is not longer than the {length} tokens the model is trained for"
            )
        _refuse_ambiguous(stage, method, number)
        method = _method(stage.rope, method, length, stage.context)
        methods.append(method)
        length = stage.context
    return tuple(methods)


def _trained_length(config: Any) -> int:
    """Tokens that a checkpoint was trained for: some say only the original length beside their factor."""
    length = int(config.max_position_embeddings)
    method = methods_from_config(config.to_dict()).get(None)
    if isinstance(method, Yarn):
        return max(length, round(method.factor * method.original_max_position_embeddings))
    return length


def _refuse_ambiguous(stage: Stage, current: RopeMethod, number: int) -> None:
    rope = stage.rope
    if isinstance(current, Linear) and rope.method == "linear" and number == 0 and rope.factor is None:
        raise RopewalkError(
            f"the checkpoint is scaled by {current.factor:g} already, and its config cannot say whether "
            "max_position_embeddings counts that in; give the whole factor as stages.0.rope.factor"
        )
    if rope.method == "ntk" and number and rope.factor is not None:
        raise RopewalkError(
            f"stages.{number}.rope.factor {rope.factor:g}: an ntk factor multiplies the base of the stage before; "
            "leave it out, or give the base itself with method theta"
        )
    if rope.method == "longrope" and stage.positions == "reset":
        raise RopewalkError(
            f"stages.{number}: with positions reset, longrope would choose its factors by the longest document and "
            "not by the context; use positions continuous"
        )


def _method(rope: Rope, current: RopeMethod, length: int, context: int) -> RopeMethod:
    if rope.start_tokens:
        raise RopewalkError(
            f"start_tokens {rope.start_tokens} has no place in a transformers config, so the result would not load "
            "elsewhere; set it to 0"
        )
    parameters = MethodParameters(**{f.name: getattr(rope, f.name) for f in fields(MethodParameters)})
    rope_theta = None if rope.rope_theta == "auto" else float(rope.rope_theta)
    return method_for_target(
        rope.method, current, length, context, rope_theta=rope_theta, parameters=parameters
    )


def _packing(recipe: Recipe, stage: Stage) -> PackingSettings:
    # Under the pattern anchor the row's BOS is the anchor, whatever the other stages do.
    bos = "auto" if stage.pattern == "anchor" else recipe.data.bos
    return PackingSettings(
        context=stage.context,
        pattern=stage.pattern,
        positions=stage.positions,
        bos=bos,
        eos=recipe.data.eos,
        long_documents=recipe.data.long_documents,
    )
