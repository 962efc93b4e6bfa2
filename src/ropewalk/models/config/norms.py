"""Where a decoder normalises, by its model type: configs state no more than switches of some types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

PRE_NORM = (
    *("apertus", "apertus1p5_text", "arcee", "axk1", "bitnet", "codegen", "cohere", "cohere2", "cohere2_moe"),
    *(
        "cohere_compass_text",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "diffllama",
        "doge",
        "dots1",
    ),
    *("ernie4_5", "ernie4_5_moe", "exaone", "exaone_moe", "falcon", "flint", "gemma", "glm", "glm4_moe"),
    *("glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj"),
    *("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "iquestcoder", "jais2", "laguna"),
    *("lfm2", "lfm2_moe", "llama", "llama4_text", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *(
        "ministral",
        "ministral3",
        "mistral",
        "mistral4",
        "mistral_large4_text",
        "mixtral",
        "nanochat",
        "nemotron",
    ),
    *(
        "olmo",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
    ),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "seed_oss"),
    *("smollm3", "solar_open", "stablelm", "starcoder2", "step3p5", "vaultgemma", "youtu"),
)
"""Model types with a norm before attention and none after it. What other types do that are named nowhere here is not
known."""
POST_NORM = ("exaone4", "flex_olmo", "olmo2", "olmo3")
"""Model types with a norm after attention and none before it."""
BOTH_NORMS = (
    *(
        "afmoe",
        "beam",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "glm4v_text",
        "hyperclovax",
        "kolibri1",
    ),
    "lfm3",
)
"""Model types with a norm before attention and one after it."""
QK_NORM_OF_HEADS = (
    *("afmoe", "apertus", "apertus1p5_text", "beam", "doge", "dots1", "exaone4", "exaone_moe", "flint"),
    *(
        "gemma3_text",
        "gemma4_text",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "kolibri1",
        "laguna",
        "lfm2",
    ),
    *("lfm2_moe", "lfm3", "llama4_text", "mellum", "nanochat", "persimmon", "qwen3", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "sarvam_moe", "step3p5"),
)
"""Model types that normalise the queries and keys of each head."""
QK_NORM_OF_LAYERS = ("flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe")
"""Model types that normalise the queries, and the keys, of all heads together."""
QK_SWITCHES = ("use_qk_norm", "qk_layernorm")
"""Keys with which configs of some types turn the norm of each head's queries and keys on or off."""
POST_SWITCH = "use_post_norm"
"""Key with which HyperCLOVA X turns the norm after attention off."""

Placement = Literal["pre", "post", "both"]
QkNorm = Literal["none", "head", "layer"]


class Norms(NamedTuple):
    """Where a decoder normalises.

    Attributes:
        placement: before attention, after it, or both.
        qk_norm: whether queries and keys are normalised: of each head, or of all heads of a layer together.
    """

    placement: Placement
    qk_norm: QkNorm


def norms_of(values: Mapping[str, Any]) -> Norms | None:
    """Where a decoder normalises; None if its model type was not examined.

    Args:
        values: values of the decoder's config, as in :attr:`ropewalk.models.config.model.ModelConfig.values`.

    Source: the families of transformers 5, of which tests run tiny models.
    """
    kind = values.get("model_type")
    if kind in BOTH_NORMS:
        placement: Placement = "both" if values.get(POST_SWITCH, True) else "pre"
    elif kind in POST_NORM:
        placement = "post"
    elif kind in PRE_NORM:
        placement = "pre"
    else:
        return None
    switches = [bool(values[key]) for key in QK_SWITCHES if values.get(key) is not None]
    if switches:
        return Norms(placement, "head" if any(switches) else "none")
    if kind in QK_NORM_OF_LAYERS:
        return Norms(placement, "layer")
    return Norms(placement, "head" if kind in QK_NORM_OF_HEADS else "none")
