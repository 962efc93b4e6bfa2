"""LongRoPE: the search for rescale factors, apart from what it is measured with, and the tables it leaves.

Names are imported on first use: reading a table or naming an algorithm needs no model.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.search.algorithm import Algorithm, Ask, Evaluator, Job, Measured
    from ropewalk.search.algorithms import algorithm_named, check_algorithm
    from ropewalk.search.evolution import EvolutionSettings, crossover, evolve, mutate
    from ropewalk.search.factors import Factors, read_factors, write_factors
    from ropewalk.search.goal import Goal, goal_of, rescale_factors
    from ropewalk.search.ledger import Ledger
    from ropewalk.search.loop import SearchResult, search
    from ropewalk.search.objective import ModelEvaluator, ShortPenalty
    from ropewalk.search.settings import ALGORITHMS, DEFAULT_ALGORITHM, SearchSettings
    from ropewalk.search.space import START_TOKENS, Candidate, Space

_HOMES = {
    "ALGORITHMS": "settings",
    "Algorithm": "algorithm",
    "Ask": "algorithm",
    "Candidate": "space",
    "DEFAULT_ALGORITHM": "settings",
    "Evaluator": "algorithm",
    "EvolutionSettings": "evolution",
    "Factors": "factors",
    "Goal": "goal",
    "Job": "algorithm",
    "Ledger": "ledger",
    "Measured": "algorithm",
    "ModelEvaluator": "objective",
    "START_TOKENS": "space",
    "SearchResult": "loop",
    "SearchSettings": "settings",
    "ShortPenalty": "objective",
    "Space": "space",
    "algorithm_named": "algorithms",
    "check_algorithm": "algorithms",
    "crossover": "evolution",
    "evolve": "evolution",
    "goal_of": "goal",
    "mutate": "evolution",
    "read_factors": "factors",
    "rescale_factors": "goal",
    "search": "loop",
    "write_factors": "factors",
}

__all__ = [
    "ALGORITHMS",
    "DEFAULT_ALGORITHM",
    "START_TOKENS",
    "Algorithm",
    "Ask",
    "Candidate",
    "Evaluator",
    "EvolutionSettings",
    "Factors",
    "Goal",
    "Job",
    "Ledger",
    "Measured",
    "ModelEvaluator",
    "SearchResult",
    "SearchSettings",
    "ShortPenalty",
    "Space",
    "algorithm_named",
    "check_algorithm",
    "crossover",
    "evolve",
    "goal_of",
    "mutate",
    "read_factors",
    "rescale_factors",
    "search",
    "write_factors",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
