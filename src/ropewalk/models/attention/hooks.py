"""Pass a layout to ``attend`` inside a transformers model, without patching its classes.

transformers lets a library register an attention function and a mask function under a name, and passes keyword
arguments of ``model(...)`` down to the attention function. ``model(input_ids, layout=layout)`` therefore works on every
decoder whose layers pass on their keyword arguments. Hooks on the model check the call, add the layout's position ids,
and record that a layout was given: an attention function that is reached without it then raises an error instead of
silently attending across documents.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.attention import attend
from ropewalk.attention.chosen import attend_chosen
from ropewalk.attention.layout import PackedLayout, cached_per_layout
from ropewalk.attention.options import AttentionOptions, Locality
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.attention.kv_cache import cache_in
from ropewalk.models.compute.losses import decoder_of
from ropewalk.models.config.layers import WINDOWS_IN_THE_MASK
from ropewalk.models.rope.generation import unpinned_methods
from ropewalk.parallel import ShardedLayouts, sharded_attend
from ropewalk.rope import RotaryEmbedding, RotaryRows

OVER_SDPA = "ropewalk"
"""Registered name; calls without a layout (generation) use SDPA."""
OVER_EAGER = "ropewalk_eager"
"""The same with the model's own eager attention, for models that SDPA does not support (soft-capped scores, sinks)."""


ASKED = ("scaling", "softcap", "sliding_window", "s_aux", "dropout", "is_causal")
"""Attributes in which transformers' modules describe their attention."""
PASSED_BY = (
    *("position_ids", "use_cache", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
)
"""Keyword arguments that do not affect attention: positions are already applied to queries and keys."""
OF_THE_LOSS = ("num_items_in_batch", "shift_labels")
"""Keyword arguments for the loss, which models pass to their layers, too."""
KNOWN_OPTIONS = (*ASKED, *PASSED_BY, *OF_THE_LOSS)


SHARED_LAYERS = "num_kv_shared_layers"
"""Config key for the number of last layers that attend to the keys and values of earlier ones."""


@dataclass(frozen=True, eq=False)
class LayoutCall:
    """The value passed down to the attention function as ``layout=``.

    Attributes:
        layouts: one layout for each row of the batch.
        engine: name of the attention engine, or ``auto``.
        localities: window or chunk of each layer.
        position_ids: int64 ``[batch or 1, tokens]``, for this process's part of the rows.
        sharded: how the rows are split over ranks; None if this process has whole rows.
    """

    layouts: tuple[PackedLayout, ...]
    engine: str
    localities: tuple[Locality, ...]
    position_ids: Tensor
    sharded: ShardedLayouts | None = None

    def locality_of(self, layer: int | None) -> Locality:
        """Window or chunk of one layer; if all layers agree, the module need not state its number.

        Raises:
            EngineError: if layers differ and the module does not say which layer it is.
        """
        if layer is not None and layer < len(self.localities):
            return self.localities[layer]
        alike = set(self.localities)
        if len(alike) != 1:
            raise EngineError(
                f"an attention module has layer_idx {layer}, but needs a value from 0 to {len(self.localities) - 1}, "
                "because the attention of the layers differs in the config"
            )
        return alike.pop()

    @property
    def total_length(self) -> int:
        """Tokens in a whole row."""
        return self.layouts[0].total_length


_current: ContextVar[LayoutCall | None] = ContextVar("ropewalk_layout_call", default=None)
_any_positions: ContextVar[bool] = ContextVar("ropewalk_any_positions", default=False)


@contextmanager
def any_positions() -> Iterator[None]:
    """Let positions of a row go back without a layout: the audit gives one sequence positions of its choice."""
    token = _any_positions.set(True)
    try:
        yield
    finally:
        _any_positions.reset(token)


def has_layout() -> bool:
    """Whether a model call with a layout is active; attention that is reached without the layout must then raise."""
    return _current.get() is not None


def register() -> None:
    """Register both names with transformers; needed once, before a model that uses one of them is built."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name, stock in ((OVER_SDPA, "sdpa"), (OVER_EAGER, "eager")):
        AttentionInterface.register(name, _attention_over(stock))
        AttentionMaskInterface.register(name, _mask_over(ALL_MASK_ATTENTION_FUNCTIONS[stock]))


def _mask_over(stock: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        # With a layout no mask tensor is built: transformers would allocate T x T booleans for a packed row.
        return None if _current.get() is not None else stock(*args, **kwargs)

    return mask


def _attention_over(stock: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        layout: LayoutCall | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # What an indexer has chosen for each query.
        chosen = options.pop("indices", None)
        if layout is None:
            if chosen is not None:
                attention_mask = _of_chosen(attention_mask, chosen, key.shape[2])
            return _stock_attention(stock, module, query, key, value, attention_mask, **options)
        requested = attention_options_of(module, layout, options)
        query = _tuned_by_position(module, query, layout.position_ids)
        # The rotation ran in float32; queries and keys are rounded once, here, to the values' dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if chosen is not None and chosen.shape[-1]:
            output = attend_chosen(query, key, value, layout.layouts, chosen, requested)
        elif layout.sharded is None:
            output = attend(query, key, value, layout.layouts, layout.engine, requested)
        else:
            output = sharded_attend(query, key, value, layout.sharded, layout.engine, requested)
        return output.transpose(1, 2).contiguous(), None

    return attention


def attention_options_of(module: Any, layout: LayoutCall, options: dict[str, Any]) -> AttentionOptions:
    """The attention parameters of a layer, from its config and from what its module passes.

    Raises:
        EngineError: if no engine supports them, or config and module disagree.
    """
    name, number = type(module).__name__, getattr(module, "layer_idx", None)
    if options.get("dropout"):
        raise EngineError(
            f"{name} uses attention dropout {options['dropout']}, which no attention engine supports; set "
            "attention_dropout to 0 in the model's config"
        )
    if options.get("is_causal") is False:
        raise EngineError(f"{name} attends in both directions; packed rows need a causal decoder")
    # An option that no engine knows could change the result, so it is refused and not ignored.
    unknown = [key for key, value in options.items() if value is not None and key not in KNOWN_OPTIONS]
    if unknown:
        raise EngineError(
            f"{name} calls its attention function with {', '.join(unknown)}, which no attention engine "
            "supports; this architecture cannot be trained on packed rows"
        )
    locality, window = layout.locality_of(number), options.get("sliding_window")
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    if "sliding_window" not in options and model_type in WINDOWS_IN_THE_MASK:
        window = locality.window
    if window != locality.window:
        requested, configured = (
            "no sliding window" if tokens is None else f"a sliding window of {tokens} tokens"
            for tokens in (window, locality.window)
        )
        raise EngineError(
            f"layer {number} ({name}) uses {requested}, but the config states {configured}; correct sliding_window "
            "or layer_types in the config"
        )
    return AttentionOptions(
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        window=locality.window,
        chunk=locality.chunk,
        sinks=options.get("s_aux"),
    )


def _tuned_by_position(module: Any, query: Tensor, position_ids: Tensor) -> Tensor:
    """Queries with a temperature that depends on their positions.

    Llama 4 scales the queries of its layers without RoPE by their index in the tensor. The index equals the position
    only if one sequence fills the tensor: not if positions restart, and not in a shard of a row.

    Args:
        module: attention module of a layer.
        query: ``[batch, num_heads, length, head_dim]``.
        position_ids: int64 ``[batch or 1, length]``.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def tuning(positions: Tensor) -> Tensor:
        steps = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale))
        tuned: Tensor = steps * module.attn_scale + 1.0
        # The layer computes it in float32 in any model; a float64 model must not inherit float32 rounding here.
        return tuned.to(torch.promote_types(query.dtype, tuned.dtype))

    places = torch.arange(query.shape[2], device=query.device)
    # The layer has already applied its own factor for the index in the tensor, so only the ratio remains.
    factor = tuning(position_ids) / tuning(places)
    return query * factor[:, None, :, None].to(query.dtype)


def _of_chosen(mask: Tensor | None, chosen: Tensor, keys: int) -> Tensor:
    """A mask without the keys that queries have not chosen, as transformers makes it for its own functions.

    Args:
        mask: ``[batch, 1, queries, keys]``, bool or of numbers to add to scores.
        chosen: int32 ``[batch, queries, chosen]``.
        keys: number of keys.
    """
    assert mask is not None
    found = torch.zeros(*chosen.shape[:2], keys, dtype=torch.bool, device=chosen.device)
    found = found.scatter_(-1, chosen.long(), True)[:, None]
    return mask & found if mask.dtype == torch.bool else mask.masked_fill(~found, torch.finfo(mask.dtype).min)


def _stock_attention(
    stock: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """A plain causal sequence, possibly cached or padded: transformers' own function in the model's dtype."""
    # A layout was given to the model but did not arrive here: the row would be attended to as one document.
    if _current.get() is not None:
        raise EngineError(
            f"{type(module).__name__} does not pass keyword arguments to its attention function, so the document "
            "boundaries of packed rows cannot reach this function; this architecture cannot be trained on packed rows"
        )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The rotation ran in float32, and a cache that the model created itself has widened the values too.
    dtype = _compute_dtype(module, value)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(dtype)
    if stock == "eager":
        # Each model file has an eager function of its own, with its soft caps and sinks.
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS[stock]
    result: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **options)
    return result


def _compute_dtype(module: nn.Module, value: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(value.device.type):
        return torch.get_autocast_dtype(value.device.type)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return value.dtype


class LayoutHooks:
    """Forward hooks of one model: they check each call and record its layout, and clear the record afterwards."""

    def __init__(self, engine: str, localities: tuple[Locality, ...]):
        """Create the hooks; ``localities`` are the window or chunk of each layer."""
        self.engine, self.localities = engine, localities
        self._marks: list[tuple[Token[LayoutCall | None], ExitStack]] = []

    def install(self, model: nn.Module) -> None:
        """Hook the module that users call and, if it is a different one, the decoder inside that losses call."""
        # Losses call the decoder below the output head directly, so it needs the hooks as much as the whole model.
        modules = {id(m): m for m in (model, decoder_of(model) if hasattr(model, "base_model") else model)}
        for module in modules.values():
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            # always_call: after an error in the forward pass, the next call must not find this one's layout.
            module.register_forward_hook(self._after, always_call=True)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = _with_every_query(module, kwargs)
        call = kwargs.get("layout")
        if call is None and _current.get() is None and not _any_positions.get():
            _refuse_restarts(kwargs)
        pinned = ExitStack()
        if call is not None and not isinstance(call, LayoutCall):
            given = kwargs.get("position_ids")
            kwargs = self._checked(args, kwargs)
            call = kwargs["layout"]
            _pin_length(module, call, pinned, given)
        if call is None and (cache := cache_in(kwargs)) is not None:
            _round_keys_into(cache)
        # If the layout does not reach an inner module, the outer record stays, so its attention raises an error.
        self._marks.append((_current.set(call if call is not None else _current.get()), pinned))
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._marks:
            mark, pinned = self._marks.pop()
            _current.reset(mark)
            pinned.close()

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        ids = args[0] if args else kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if ids is None:
            raise RopewalkError("a model call with a layout needs input_ids or inputs_embeds")
        given = kwargs["layout"]
        sharded = given if isinstance(given, ShardedLayouts) else None
        if sharded is not None:
            layouts = sharded.layouts
        else:
            layouts = (given,) * len(ids) if isinstance(given, PackedLayout) else tuple(given)
        if len(layouts) != len(ids):
            raise RopewalkError(
                f"got {len(layouts)} layouts for a batch of {len(ids)} rows; give one layout for all rows, or one "
                "for each row"
            )
        if sharded is not None and ids.shape[1] != sharded.shard_length:
            raise RopewalkError(
                f"this rank's part of a row has {sharded.shard_length} tokens, but the rows of the batch have "
                f"{ids.shape[1]}; pass only this rank's part of each row"
            )
        length = ids.shape[1] if sharded is None else layouts[0].total_length
        for layout in layouts:
            if layout.total_length != length:
                raise RopewalkError(
                    f"the layout describes {layout.total_length} tokens, but the row has {length}"
                )
        mask = kwargs.get("attention_mask")
        # An empty one comes with RowCollator's batches, so that other models fail.
        if mask is not None and mask.numel():
            raise RopewalkError(
                "the layout already determines which tokens a token attends to; leave attention_mask out"
            )
        if cache_in(kwargs) is not None:
            raise RopewalkError("packed rows cannot use a key/value cache; leave the cache out of the call")
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            # transformers would count from 0 in each tensor, which is wrong for shards and for position reset.
            position_ids = positions_on(sharded or layouts, ids.device)
        return {
            **kwargs,
            "layout": LayoutCall(layouts, self.engine, self.localities, position_ids, sharded),
            "position_ids": position_ids,
            # Never read. Without any mask transformers tests whether position ids restart, which waits for the device.
            "attention_mask": torch.empty(len(ids), 1, 0, 0, device=ids.device),
            "use_cache": False,
        }


def _with_every_query(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with which a model computes all positions in all layers, although logits of the last are wanted.

    Gemma 4 drops the others before layers that share keys. A layout describes whole rows; and without a mask, causal
    attention of several queries would be aligned with the first keys, which transformers prevents for SDPA by its name.
    """
    keep, cache = kwargs.get("logits_to_keep"), cache_in(kwargs)
    if (
        not isinstance(keep, int)
        or keep < 1
        or not getattr(module.config.get_text_config(), SHARED_LAYERS, 0)
    ):
        return kwargs
    if keep == 1 and kwargs.get("layout") is None and not getattr(cache, "is_compileable", False):
        return kwargs
    return {**kwargs, "logits_to_keep": torch.arange(-keep, 0)}


def localities_of(model: nn.Module) -> Counter[Locality]:
    """The distinct windows and chunks of a model's layers, for which attention is prepared, with numbers of layers.

    Args:
        model: a model on which the hooks are installed.
    """
    return Counter(localities_by_layer(model))


def localities_by_layer(model: nn.Module) -> tuple[Locality, ...]:
    """The window or chunk of each layer of a model on which the hooks are installed."""
    hooks: LayoutHooks = model._ropewalk_hooks  # type: ignore[assignment]
    return hooks.localities


@cached_per_layout
def positions_on(layouts: tuple[PackedLayout, ...] | ShardedLayouts, device: torch.device) -> Tensor:
    """int64 ``[batch, length]``: position ids of the rows, or of this rank's shards of them, on a device."""
    if isinstance(layouts, ShardedLayouts):
        return layouts.position_ids().to(device)
    return torch.stack([layout.position_ids for layout in layouts]).to(device)


def _pin_length(module: nn.Module, call: LayoutCall, pinned: ExitStack, given: Tensor | None) -> None:
    """Fix length-dependent frequencies of each row to its own length, as if it were alone.

    Otherwise each shard would use its own length, and all rows that of the longest one. The layouts know the lengths of
    their own positions; of positions that are given instead, here or in the rotary module, the host waits for the
    device.
    """
    ours = [inner for inner in module.modules() if isinstance(inner, RotaryEmbedding | RotaryRows)]
    dependent = [each for each in ours if each.length_dependent]
    if dependent:
        lengths = [layout.rope_length for layout in call.layouts]
        if given is not None and call.sharded is None:
            # Of one axis: those of text are equal.
            rows = given.flatten(0, -3)[0] if given.dim() > 2 else given
            lengths = (rows.amax(-1) + 1).expand(len(call.layouts)).tolist()
        for rotary in dependent:
            pinned.enter_context(rotary.pinned_rows(lengths))
    names = [] if ours or call.sharded is None else unpinned_methods(module)
    if names:
        raise EngineError(
            f"{type(module).__name__} runs transformers' own {names[0]} RoPE, which would use the length of a shard "
            "instead of the length of the row; load the model with exact_rope=True"
        )


def _round_keys_into(cache: Any) -> None:
    """Make a key/value cache store the rotated keys in the values' dtype, as the attention product uses them.

    An exact rotation gives float32 keys, and a cache takes its dtype from the first keys: values would be
    widened with them, and a static cache rejects mixed dtypes. Only this cache object is changed.
    """
    # Once: a cache is passed again with every generated token.
    if not isinstance(cache, _RoundedKeys):
        # mypy does not take a class for hashable.
        cache.__class__ = _rounded_keys(type(cache))  # type: ignore[arg-type]


class _RoundedKeys:
    """Put in front of a cache's own class, so that the cache and its deep copies store rounded keys."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys.to(values.dtype), values, *args, **kwargs)  # type: ignore[misc]


@lru_cache
def _rounded_keys(own: type) -> type:
    # One class for all caches of a kind: compiled code is compiled again for another class.
    return type(own.__name__, (_RoundedKeys, own), {})


def _refuse_restarts(kwargs: dict[str, Any]) -> None:
    """Raise for position ids that restart: they mean packed documents, whose boundaries must not be guessed."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, Tensor) or cache_in(kwargs) is not None:
        return
    restarts = positions.diff(dim=-1) <= 0
    if isinstance(mask, Tensor) and mask.shape[-1] == positions.shape[-1] and mask.ndim == 2:
        # Positions of padding may be anything.
        restarts = restarts & mask[:, 1:].bool() & mask[:, :-1].bool()
    elif mask is not None:
        return
    if bool(restarts.any()):
        raise RopewalkError(
            "position_ids restart inside a row, so the row contains packed documents; describe the documents with "
            "layout="
        )
