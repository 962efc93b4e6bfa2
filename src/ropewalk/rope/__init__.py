"""RoPE mathematics: the frequencies of each method, their form in configs, theory, and the rotary module.

Names are imported on first use: the theory of bases needs numpy but not torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.rope.config import (
        ROPE_KEYS,
        Spelling,
        config_entries,
        for_all_readers,
        head_dim,
        method_from_config,
        methods_from_config,
        replace_methods,
    )
    from ropewalk.rope.methods import (
        METHODS,
        Default,
        DynamicNtk,
        Linear,
        Llama3,
        LongRope,
        Ntk,
        Proportional,
        Yarn,
    )
    from ropewalk.rope.methods.base import (
        RopeFrequencies,
        RopeMethod,
        compared_methods,
        register,
        trainable_methods,
        unscaled_inv_freq,
    )
    from ropewalk.rope.methods.default import Theta
    from ropewalk.rope.methods.longrope import has_published_attention, longrope_attention_factor
    from ropewalk.rope.rotary import STYLES, RotaryEmbedding, RotaryRows, Style
    from ropewalk.rope.target import bound_at, candidate, candidates, check_candidate, method_for_target
    from ropewalk.rope.theory import critical_dimension, ntk_theta, scaled_theta

_HOMES = {
    "candidates": "target",
    "compared_methods": "methods.base",
    "register": "methods.base",
    "trainable_methods": "methods.base",
    "Default": "methods",
    "DynamicNtk": "methods",
    "Linear": "methods",
    "Llama3": "methods",
    "LongRope": "methods",
    "METHODS": "methods",
    "Ntk": "methods",
    "Proportional": "methods",
    "ROPE_KEYS": "config",
    "RopeFrequencies": "methods.base",
    "RopeMethod": "methods.base",
    "RotaryEmbedding": "rotary",
    "RotaryRows": "rotary",
    "STYLES": "rotary",
    "Spelling": "config",
    "Style": "rotary",
    "Theta": "methods.default",
    "Yarn": "methods",
    "bound_at": "target",
    "candidate": "target",
    "check_candidate": "target",
    "config_entries": "config",
    "critical_dimension": "theory",
    "for_all_readers": "config",
    "has_published_attention": "methods.longrope",
    "head_dim": "config",
    "longrope_attention_factor": "methods.longrope",
    "method_for_target": "target",
    "method_from_config": "config",
    "methods_from_config": "config",
    "ntk_theta": "theory",
    "replace_methods": "config",
    "scaled_theta": "theory",
    "unscaled_inv_freq": "methods.base",
}

__all__ = [
    "METHODS",
    "ROPE_KEYS",
    "STYLES",
    "Default",
    "DynamicNtk",
    "Linear",
    "Llama3",
    "LongRope",
    "Ntk",
    "Proportional",
    "RopeFrequencies",
    "RopeMethod",
    "RotaryEmbedding",
    "RotaryRows",
    "Spelling",
    "Style",
    "Theta",
    "Yarn",
    "bound_at",
    "candidate",
    "candidates",
    "check_candidate",
    "compared_methods",
    "config_entries",
    "critical_dimension",
    "for_all_readers",
    "has_published_attention",
    "head_dim",
    "longrope_attention_factor",
    "method_for_target",
    "method_from_config",
    "methods_from_config",
    "ntk_theta",
    "register",
    "replace_methods",
    "scaled_theta",
    "trainable_methods",
    "unscaled_inv_freq",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
