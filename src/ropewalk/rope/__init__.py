"""RoPE mathematics: frequencies of each method, their config, theory, and the rotary module."""

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
    ntk_theta,
    unscaled_inv_freq,
)
from ropewalk.rope.readers import for_all_readers, has_published_attention
from ropewalk.rope.rotary import STYLES, RotaryEmbedding, RotaryRows, Style
from ropewalk.rope.target import PARAMETERS, MethodParameters, method_for_target, trained_length
from ropewalk.rope.tensions import config_tensions
from ropewalk.rope.theory import critical_dimension, scaled_theta

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
    "replace_methods",
    "scaled_theta",
    "trained_length",
    "unscaled_inv_freq",
]
