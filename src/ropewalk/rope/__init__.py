"""RoPE mathematics: frequencies of each method, their config, theory, and the rotary module.

Names are imported on first use, so the theory of bases alone needs numpy and no torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.rope.candidates import CANDIDATES, candidate, check_candidate
    from ropewalk.rope.config import (
        ROPE_KEYS,
        Spelling,
        config_entries,
        head_dim,
        method_from_config,
        methods_from_config,
        replace_methods,
    )
    from ropewalk.rope.config_warnings import config_tensions
    from ropewalk.rope.methods import (
        METHODS,
        Default,
        DynamicNtk,
        Linear,
        Llama3,
        LongRope,
        Ntk,
        RopeFrequencies,
        RopeMethod,
        Theta,
        Yarn,
        longrope_attention_factor,
        unscaled_inv_freq,
    )
    from ropewalk.rope.readers import for_all_readers, has_published_attention, reader_notes
    from ropewalk.rope.rotary import STYLES, RotaryEmbedding, RotaryRows, Style
    from ropewalk.rope.target import PARAMETERS, MethodParameters, method_for_target, trained_length
    from ropewalk.rope.theory import critical_dimension, ntk_theta, scaled_theta

_HOMES = {
    "CANDIDATES": "candidates",
    "Default": "methods",
    "DynamicNtk": "methods",
    "Linear": "methods",
    "Llama3": "methods",
    "LongRope": "methods",
    "METHODS": "methods",
    "MethodParameters": "target",
    "Ntk": "methods",
    "PARAMETERS": "target",
    "ROPE_KEYS": "config",
    "RopeFrequencies": "methods",
    "RopeMethod": "methods",
    "RotaryEmbedding": "rotary",
    "RotaryRows": "rotary",
    "STYLES": "rotary",
    "Spelling": "config",
    "Style": "rotary",
    "Theta": "methods",
    "Yarn": "methods",
    "candidate": "candidates",
    "check_candidate": "candidates",
    "config_entries": "config",
    "config_tensions": "config_warnings",
    "critical_dimension": "theory",
    "for_all_readers": "readers",
    "has_published_attention": "readers",
    "head_dim": "config",
    "longrope_attention_factor": "methods",
    "method_for_target": "target",
    "method_from_config": "config",
    "methods_from_config": "config",
    "ntk_theta": "theory",
    "reader_notes": "readers",
    "replace_methods": "config",
    "scaled_theta": "theory",
    "trained_length": "target",
    "unscaled_inv_freq": "methods",
}

__all__ = [
    "CANDIDATES",
    "METHODS",
    "PARAMETERS",
    "ROPE_KEYS",
    "STYLES",
    "Default",
    "DynamicNtk",
    "Linear",
    "Llama3",
    "LongRope",
    "MethodParameters",
    "Ntk",
    "RopeFrequencies",
    "RopeMethod",
    "RotaryEmbedding",
    "RotaryRows",
    "Spelling",
    "Style",
    "Theta",
    "Yarn",
    "candidate",
    "check_candidate",
    "config_entries",
    "config_tensions",
    "critical_dimension",
    "for_all_readers",
    "has_published_attention",
    "head_dim",
    "longrope_attention_factor",
    "method_for_target",
    "method_from_config",
    "methods_from_config",
    "ntk_theta",
    "reader_notes",
    "replace_methods",
    "scaled_theta",
    "trained_length",
    "unscaled_inv_freq",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
