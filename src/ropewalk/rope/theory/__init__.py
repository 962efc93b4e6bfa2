"""Theory of how far a RoPE setting reaches, and what a longer context needs.

``margin`` finds the distances at which a setting fails, ``bases`` the bases that do not fail. ``scaling`` and ``rules``
compute settings for a longer context, recommend one, and divide the extension into stages. ``published`` lists settings
of published models, and ``exposure`` the angles that are new to each pair.
"""

from ropewalk.rope.theory.bases import (
    CEILING,
    SAFE_CEILING,
    FeasibleBases,
    feasible_bases,
    safe_base,
    smallest_base,
)
from ropewalk.rope.theory.exposure import PairExposure, exposure, slowest_angles
from ropewalk.rope.theory.margin import (
    SEARCH_LIMIT,
    attention_upper_bound,
    context_bound,
    inv_freq_of_base,
    similarity_margin,
    violations,
)
from ropewalk.rope.theory.published import EXTENSIONS, SCHEDULES, Extension, Schedule, published_near
from ropewalk.rope.theory.rules import (
    RULES,
    Recommendation,
    check_rule,
    length_floor,
    recommended_theta,
    stage_contexts,
    theta_by_rule,
)
from ropewalk.rope.theory.scaling import SHORTEST_LENGTH, critical_dimension, ntk_theta, scaled_theta

__all__ = [
    "CEILING",
    "EXTENSIONS",
    "RULES",
    "SAFE_CEILING",
    "SCHEDULES",
    "SEARCH_LIMIT",
    "SHORTEST_LENGTH",
    "Extension",
    "FeasibleBases",
    "PairExposure",
    "Recommendation",
    "Schedule",
    "attention_upper_bound",
    "check_rule",
    "context_bound",
    "critical_dimension",
    "exposure",
    "feasible_bases",
    "inv_freq_of_base",
    "length_floor",
    "ntk_theta",
    "published_near",
    "recommended_theta",
    "safe_base",
    "scaled_theta",
    "similarity_margin",
    "slowest_angles",
    "smallest_base",
    "stage_contexts",
    "theta_by_rule",
    "violations",
]
