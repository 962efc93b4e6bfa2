"""What other programs read of the RoPE in a config: what is written for them, and what they make of it all the same."""

from __future__ import annotations

import math
from typing import Any

from ropewalk.rope.config import MSCALES, ORIGINAL, Config, methods_from_config
from ropewalk.rope.methods import (
    Default,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    RopeMethod,
    Theta,
    Yarn,
    longrope_attention_factor,
)

LLAMA_LIKE = ("llama", "mistral", "mixtral")
"""Model types whose RoPE factors llama.cpp's converter writes for llama3 alone."""


def for_all_readers(config: Config) -> dict[str, Any]:
    """A copy of a config that says longrope so that every reader computes the same with it.

    transformers wants ``factor``, the longest input over the original length, and takes ``attention_factor``. vLLM
    takes ``short_mscale`` and ``long_mscale``, and without them the published ``√(1 + ln s / ln T)``: they are
    written where the attention factor is another.

    Args:
        config: as :func:`~ropewalk.rope.config.replace_methods` gives it in the 5.x spelling, with its final
            ``max_position_embeddings``. One that has another RoPE, or one for each layer type, comes back as it is.
    """
    entry = config.get("rope_parameters") or {}
    if entry.get("rope_type") != LongRope.name:
        return dict(config)
    factor = config["max_position_embeddings"] / entry[ORIGINAL]
    said = {**entry, "factor": factor}
    if not has_published_attention(entry["attention_factor"], factor, entry[ORIGINAL]):
        said |= dict.fromkeys(MSCALES, entry["attention_factor"])
    return {**config, "rope_parameters": said}


def has_published_attention(attention_factor: float, factor: float, original_length: int) -> bool:
    """Whether an attention factor is ``√(1 + ln s / ln T)``, to within what float32 cos and sin can tell."""
    return math.isclose(attention_factor, longrope_attention_factor(factor, original_length), rel_tol=2**-24)


def reader_notes(method: RopeMethod, context: int, model_type: str | None = None) -> list[str]:
    """Which programs read a method from a config, and which compute something else with it.

    Args:
        method: in the config.
        context: ``max_position_embeddings`` there, tokens.
        model_type: of the config, such as ``llama``; None where it is unknown.

    Returns:
        A sentence a fact; none for a method of which nothing is known.

    Source: what transformers 5, vLLM, SGLang, llama.cpp and mlx-lm were read or measured to do in autumn 2026; the
    table in docs/longrope.md says which of the two.
    """
    if isinstance(method, Default | Theta | Ntk):
        return ["transformers, vLLM, SGLang, llama.cpp and mlx-lm read it: rope_theta is one number"]
    if isinstance(method, Linear):
        return [
            "vLLM and SGLang multiply max_position_embeddings by the factor once more: serve it with "
            f"--max-model-len {context} (vLLM), or a context length of {context} (SGLang)"
        ]
    if isinstance(method, Yarn):
        return _of_yarn(method, context)
    if isinstance(method, Llama3):
        if model_type in LLAMA_LIKE:
            return []
        return [
            f"llama.cpp's converter writes llama3's factors for {', '.join(LLAMA_LIKE)} alone: not llama.cpp"
        ]
    return _of_longrope(method, context, model_type) if isinstance(method, LongRope) else []


def notes_on(config: Config) -> list[str]:
    """The same for a checkpoint's config: on each RoPE that its layers have, each sentence once.

    Args:
        config: of the text model, or of a larger one that holds it as ``text_config``.
    """
    text = config.get("text_config") or config
    context, model_type = text["max_position_embeddings"], text.get("model_type")
    methods = dict.fromkeys(methods_from_config(text).values())
    return [*dict.fromkeys(note for method in methods for note in reader_notes(method, context, model_type))]


def _of_yarn(method: Yarn, context: int) -> list[str]:
    told = []
    served = round(method.original_max_position_embeddings * method.factor)
    if served != context:
        told.append(
            f"vLLM serves {served} tokens, the original length times the factor, and passes over "
            f"max_position_embeddings: give --max-model-len {context}"
        )
    formula = 0.1 * math.log(method.factor) + 1
    ours = method.frequencies().attention_factor
    if not math.isclose(ours, formula, rel_tol=2**-24):
        stated = method.attention_factor is not None
        who = "vLLM up to 0.25.0, SGLang and mlx-lm pass" if stated else "vLLM up to 0.25.0 passes"
        what = "attention_factor" if stated else "mscale and mscale_all_dim"
        told.append(
            f"{who} over {what}: cos and sin are scaled by {ours:.6g} here, by {formula:.6g} without it"
        )
    if method.attention_factor is not None:
        told.append(
            "llama.cpp adjusts the attention factor once more: whether it counts twice was not measured"
        )
    return told


def _of_longrope(method: LongRope, context: int, model_type: str | None) -> list[str]:
    original = method.original_max_position_embeddings
    switches = method.short_factor != method.long_factor
    factor = context / original
    formula = longrope_attention_factor(factor, original)
    published = has_published_attention(method.attention_factor, factor, original)
    if model_type == "phi3":
        told = [
            "llama.cpp chooses the factors by the context that it allocates"
            + ("" if published else f", with the attention factor {formula:.6g} of the formula")
        ]
    else:
        told = [
            "not llama.cpp: its converter drops these factors without a word, and the model would run default RoPE"
            if model_type in LLAMA_LIKE
            else "not llama.cpp: its converter is known to write longrope's factors for phi3 alone"
        ]
    told.append(
        f"vLLM stops at {original} tokens unless --max-model-len {context} says otherwise"
        + (", and then runs short sequences under the long factors too" if switches else "")
    )
    if switches:
        told.append(
            f"transformers' generate() changes the factors where a sequence passes {original} tokens, and most models "
            "keep the keys of the short ones; evaluation in ropewalk fixes them by the total length"
        )
    if not published:
        told.append(
            "short_mscale and long_mscale are in the config, so that vLLM and SGLang take the attention factor "
            f"{method.attention_factor:.6g} and not the published {formula:.6g}; transformers warns of the two keys "
            "and passes over them"
        )
    told.append("mlx-lm passes over the attention factor")
    return told
