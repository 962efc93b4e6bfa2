"""The theory of how far a RoPE setting reaches, and what a longer context needs.

``margin`` says at which distances a setting fails, ``bases`` which bases do not, ``scaling``, ``rules`` and
``schedules`` what to set for a longer context, ``stages`` in how many steps, ``exposure`` what is new to each pair.
"""

from ropewalk.rope.theory.bases import (
    CEILING,
    SAFE_CEILING,
    FeasibleBases,
    feasible_bases,
    safe_base,
)
from ropewalk.rope.theory.exposure import PairExposure, exposure, slowest_angles
from ropewalk.rope.theory.margin import (
    SEARCH_LIMIT,
    attention_upper_bound,
    context_bound,
    similarity_margin,
    violations,
)
from ropewalk.rope.theory.rules import RULES, check_rule, theta_by_rule
from ropewalk.rope.theory.scaling import SHORTEST_LENGTH, critical_dimension, scaled_theta
from ropewalk.rope.theory.schedules import SCHEDULES, Schedule
from ropewalk.rope.theory.stages import stage_contexts

__all__ = [
    "CEILING",
    "RULES",
    "SAFE_CEILING",
    "SCHEDULES",
    "SEARCH_LIMIT",
    "SHORTEST_LENGTH",
    "FeasibleBases",
    "PairExposure",
    "Schedule",
    "attention_upper_bound",
    "check_rule",
    "context_bound",
    "critical_dimension",
    "exposure",
    "feasible_bases",
    "safe_base",
    "scaled_theta",
    "similarity_margin",
    "slowest_angles",
    "stage_contexts",
    "theta_by_rule",
    "violations",
]
