"""The two RoPEs of a stage with short rows: one longrope, whose short factors leave the original RoPE as it is.

Short rows train with the original frequencies and long rows with the stage's, both with the stage's attention factor,
because a longrope config has one factor for every length. Training and the exported config then compute the same.
"""

from __future__ import annotations

from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, LongRope, RopeMethod
from ropewalk.rope.methods.base import unscaled_inv_freq
from ropewalk.rope.methods.longrope import NO_ROTATION
from ropewalk.training.resolved import RopeAt


def two_ropes(method: RopeMethod, context: int, checkpoint: RopeAt, key: str) -> LongRope:
    """A stage's method as the long factors of a longrope, beside the checkpoint's RoPE as its short factors.

    Args:
        method: method of the stage.
        context: context of the stage, tokens.
        checkpoint: RoPE method and trained length of the recipe's model.
        key: key of the stage's share of short rows, for messages.

    Returns:
        The method with the checkpoint's short factors (1s if it is unscaled) and original length.

    Raises:
        RopewalkError: if the checkpoint is scaled by anything but longrope, or the short factors are not its own.
    """
    original, length = checkpoint
    if isinstance(original, LongRope):
        short, length = original.short_factor, original.original_max_position_embeddings
    elif isinstance(original.plain, Default):
        short = (1.0,) * (original.rotary_dim // 2)
    else:
        raise RopewalkError(
            f"{key} needs a checkpoint with unscaled or longrope RoPE, but the model has {original.name} RoPE, which a "
            "config cannot keep for short inputs beside another one for long inputs; leave short_rows out"
        )
    if isinstance(method, LongRope) and method.short_factor != short:
        raise RopewalkError(
            f"{key} trains short rows with the RoPE of the checkpoint, but the stage's longrope has a short_factor of "
            "its own; leave short_factor out"
        )
    same_base = (method.rope_theta, getattr(method, "original_max_position_embeddings", None))
    if isinstance(method, LongRope) and same_base == (original.rope_theta, length):
        return method
    inv_freq, attention_factor = method.frequencies(context)
    unscaled = unscaled_inv_freq(original.rotary_dim, original.rope_theta)
    # A pair that does not turn at all has no finite factor.
    factors = tuple((unscaled / inv_freq).clamp(max=NO_ROTATION).tolist())
    return LongRope(original.rotary_dim, original.rope_theta, short, factors, attention_factor, length)


def refuse_equal(method: LongRope, key: str) -> None:
    """Raise if short and long rows would have the same RoPE."""
    if method.short_factor == method.long_factor:
        raise RopewalkError(
            f"{key} needs another RoPE for long rows than for short ones, but the stage keeps the checkpoint's for "
            "both; set the stage's rope, or leave short_rows out"
        )
