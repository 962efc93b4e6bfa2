"""Measuring a model: sample -> prompt -> generation -> score -> statistics, one module a benchmark.

Names are imported on first use: reading results and drawing them needs no torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.evaluation.passkey import PasskeyResult
    from ropewalk.evaluation.perplexity import PerplexityResult, default_bins, perplexity_by_position
    from ropewalk.evaluation.probe import ProbeResult, candidate_methods
    from ropewalk.evaluation.results import PositionBin, TaskResult
    from ropewalk.evaluation.rows import EvaluationRows, evaluation_rows, take_documents
    from ropewalk.evaluation.statistics import bootstrap_interval, wilson_interval
    from ropewalk.evaluation.suites import SUITES, check_suites, evaluate

# The functions passkey and probe bear their modules' names and are imported from there.
_HOMES = {
    "SUITES": "suites",
    "EvaluationRows": "rows",
    "PasskeyResult": "passkey",
    "PerplexityResult": "perplexity",
    "PositionBin": "results",
    "ProbeResult": "probe",
    "TaskResult": "results",
    "bootstrap_interval": "statistics",
    "candidate_methods": "probe",
    "check_suites": "suites",
    "default_bins": "perplexity",
    "evaluate": "suites",
    "evaluation_rows": "rows",
    "perplexity_by_position": "perplexity",
    "take_documents": "rows",
    "wilson_interval": "statistics",
}

__all__ = [
    "SUITES",
    "EvaluationRows",
    "PasskeyResult",
    "PerplexityResult",
    "PositionBin",
    "ProbeResult",
    "TaskResult",
    "bootstrap_interval",
    "candidate_methods",
    "check_suites",
    "default_bins",
    "evaluate",
    "evaluation_rows",
    "perplexity_by_position",
    "take_documents",
    "wilson_interval",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
