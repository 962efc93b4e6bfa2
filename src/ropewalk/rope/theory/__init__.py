"""Theory of how far a RoPE setting reaches, and what a longer context needs.

``margin`` finds the distances at which a setting fails, ``bases`` the bases that do not fail. ``scaling`` and ``rules``
compute settings for a longer context, recommend one, and divide the extension into stages. ``published`` lists settings
of published models, and ``exposure`` the angles that are new to each pair.
"""

from ropewalk.rope.theory.bases import (
    CEILING as CEILING,
    SAFE_CEILING as SAFE_CEILING,
    FeasibleBases as FeasibleBases,
    feasible_bases as feasible_bases,
    safe_base as safe_base,
    smallest_base as smallest_base,
)
from ropewalk.rope.theory.exposure import (
    PairExposure as PairExposure,
    exposure as exposure,
    slowest_angles as slowest_angles,
)
from ropewalk.rope.theory.margin import (
    SEARCH_LIMIT as SEARCH_LIMIT,
    attention_upper_bound as attention_upper_bound,
    context_bound as context_bound,
    inv_freq_of_base as inv_freq_of_base,
    similarity_margin as similarity_margin,
    violations as violations,
)
from ropewalk.rope.theory.published import (
    EXTENSIONS as EXTENSIONS,
    SCHEDULES as SCHEDULES,
    Extension as Extension,
    Schedule as Schedule,
    published_near as published_near,
)
from ropewalk.rope.theory.rules import (
    RULES as RULES,
    Recommendation as Recommendation,
    check_rule as check_rule,
    length_floor as length_floor,
    recommended_theta as recommended_theta,
    stage_contexts as stage_contexts,
    theta_by_rule as theta_by_rule,
)
from ropewalk.rope.theory.scaling import (
    SHORTEST_LENGTH as SHORTEST_LENGTH,
    critical_dimension as critical_dimension,
    critical_pairs as critical_pairs,
    ntk_theta as ntk_theta,
    scaled_theta as scaled_theta,
)
