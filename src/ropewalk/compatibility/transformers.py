"""transformers, whose version 5 defines what a config means, and version 4.57, which knows only the older keys."""

from __future__ import annotations

from ropewalk.compatibility.reader import (
    Checkpoint,
    Methods,
    Reader,
    RefusedConfigError,
    UnreadConfigError,
    refuse_unknown,
    stated_methods,
)
from ropewalk.errors import RopewalkError
from ropewalk.rope import (
    Default,
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Yarn,
)
from ropewalk.rope.methods.base import ORIGINAL, PARTIAL

USUAL_BASE = 10_000.0
"""Base that most config classes of transformers 4 have where a file states none."""
OTHER_BASES = {
    "apertus": 12e6, "bitnet": 5e5, "ernie4_5": 5e5, "ernie4_5_moe": 5e5, "falcon_h1": 1e5, "flex_olmo": 5e5,
    "gpt_oss": 1.5e5, "helium": 1e5, "lfm2": 1e6, "minimax": 1e6, "mixtral": 1e6, "phimoe": 1e6, "smollm3": 2e6,
}  # fmt: skip
USUAL = (
    *("arcee", "bamba", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "dots1"),
    *("exaone4", "falcon", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "gpt_neox", "granite", "granitemoe"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe", "llama"),
    *(
        "ministral",
        "mistral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
    ),
    *("qwen3_moe", "qwen3_next", "seed_oss", "stablelm", "starcoder2", "vaultgemma", "zamba2"),
)
"""Types of models whose base is :data:`USUAL_BASE`. What it makes of any other type is not known here."""
BY_LAYER = ("gemma3_text",)
"""Types whose windowed layers have ``rope_local_base_freq``."""
NEWER_KEYS = ("rope_parameters",)


PHI3_KEYS = {"type", "short_factor", "long_factor"}
OLDER_METHODS = (Default, Linear, DynamicNtk, Llama3, LongRope, Yarn)


def _as_version_5(checkpoint: Checkpoint) -> Methods:
    methods = checkpoint.methods()
    refuse_unknown(methods, (*OLDER_METHODS, Proportional))
    return methods


def _as_version_4(checkpoint: Checkpoint) -> Methods:
    refuse_unknown(checkpoint.methods(), OLDER_METHODS)
    kind = checkpoint.model_type
    bases = {**dict.fromkeys(USUAL, USUAL_BASE), **OTHER_BASES}
    if kind in BY_LAYER:
        return _by_layer(checkpoint)
    if kind not in bases:
        raise UnreadConfigError(f"the program's code for {kind or 'this model'} was not examined")
    # A later config stays complete without the newer key, but with defaults in place of what only that key states.
    known = {key: value for key, value in checkpoint.completed.items() if key not in NEWER_KEYS}
    stated = checkpoint.stated.get("rope_theta")
    known["rope_theta"] = bases[kind] if stated is None else stated
    newer = checkpoint.stated.get("rope_parameters") or {}
    if PARTIAL in newer and PARTIAL not in checkpoint.stated:
        raise UnreadConfigError(
            f"it does not read {PARTIAL} from rope_parameters, and the default in its config class for {kind} was "
            "not examined"
        )
    scaling = dict(known.get("rope_scaling") or {})
    if kind == "phi3" and scaling and scaling.keys() != PHI3_KEYS:
        raise RefusedConfigError(
            "the program's code for phi3 needs 'type', short_factor and long_factor in rope_scaling, and no other key"
        )
    if scaling.get("rope_type", scaling.get("type")) in ("longrope", "su") and ORIGINAL not in known:
        # Only the top level counts for longrope; without it, every input is within the original length.
        scaling.pop(ORIGINAL, None)
        known["rope_scaling"] = scaling
    return _computed(known)


def _by_layer(checkpoint: Checkpoint) -> Methods:
    """Gemma 3: one base for the windowed layers, one method for the others."""
    known = {key: value for key, value in checkpoint.completed.items() if key not in NEWER_KEYS}
    known["rope_theta"] = checkpoint.stated.get("rope_theta", 1e6)
    known["rope_local_base_freq"] = checkpoint.stated.get("rope_local_base_freq", 10_000.0)
    return _computed(known)


def _computed(known: dict[str, object]) -> Methods:
    try:
        return stated_methods(known)
    except RopewalkError as error:
        raise RefusedConfigError(str(error)) from error


def _length(checkpoint: Checkpoint) -> int:
    return checkpoint.length


def _none(model: str, checkpoint: Checkpoint) -> None:
    return None


TRANSFORMERS_5 = Reader(
    "transformers",
    "transformers 5",
    "transformers/modeling_rope_utils.py of 5.24.0",
    _as_version_5,
    _length,
    _none,
)
TRANSFORMERS_4 = Reader(
    "transformers-4",
    "transformers 4.57",
    "transformers/modeling_rope_utils.py and the config classes of 4.57.6",
    _as_version_4,
    _length,
    _none,
)
