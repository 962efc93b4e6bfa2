"""LongRoPE: the search for rescale factors, from a checkpoint and text to a factor table.

Names are imported on first use: reading a table or naming an algorithm needs no model.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names, make_callable

if TYPE_CHECKING:
    from ropewalk.search.algorithms import (
        Algorithm,
        Ask,
        Evaluator,
        EvolutionSettings,
        Job,
        Measured,
        algorithm_named,
        crossover,
        evolve,
        mutate,
    )
    from ropewalk.search.factor_table import Factors, import_factors, read_factors, write_factors
    from ropewalk.search.goal import Goal, goal_of, rescale_factors
    from ropewalk.search.loop import Ledger, Minimum, Strategy, minimise
    from ropewalk.search.objective import Forwards, ModelEvaluator, ShortPenalty
    from ropewalk.search.run import SearchResult, search
    from ropewalk.search.settings import ALGORITHMS, DEFAULT_ALGORITHM, SearchConfig, SearchSettings
    from ropewalk.search.space import START_TOKENS, Candidate, Space

_HOMES = {
    "ALGORITHMS": "settings",
    "Algorithm": "algorithms",
    "Ask": "algorithms",
    "Candidate": "space",
    "DEFAULT_ALGORITHM": "settings",
    "Evaluator": "algorithms",
    "EvolutionSettings": "algorithms",
    "Factors": "factor_table",
    "Forwards": "objective",
    "Goal": "goal",
    "Job": "algorithms",
    "Ledger": "loop",
    "Measured": "algorithms",
    "Minimum": "loop",
    "ModelEvaluator": "objective",
    "START_TOKENS": "space",
    "SearchConfig": "settings",
    "SearchResult": "run",
    "SearchSettings": "settings",
    "ShortPenalty": "objective",
    "Space": "space",
    "Strategy": "loop",
    "algorithm_named": "algorithms",
    "crossover": "algorithms",
    "evolve": "algorithms",
    "goal_of": "goal",
    "import_factors": "factor_table",
    "minimise": "loop",
    "mutate": "algorithms",
    "read_factors": "factor_table",
    "rescale_factors": "goal",
    "search": "run",
    "write_factors": "factor_table",
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
    "Forwards",
    "Goal",
    "Job",
    "Ledger",
    "Measured",
    "Minimum",
    "ModelEvaluator",
    "SearchConfig",
    "SearchResult",
    "SearchSettings",
    "ShortPenalty",
    "Space",
    "Strategy",
    "algorithm_named",
    "crossover",
    "evolve",
    "goal_of",
    "import_factors",
    "minimise",
    "mutate",
    "read_factors",
    "rescale_factors",
    "search",
    "write_factors",
]


__getattr__ = lazy_names(__name__, _HOMES)
# `from ropewalk import search` may bind this package or its function, whichever was imported first.
make_callable(__name__, "run")


def __dir__() -> list[str]:
    return __all__
