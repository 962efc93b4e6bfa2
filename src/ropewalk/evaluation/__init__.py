"""Measuring a model: sample -> prompt -> answer -> score -> statistics, one module a benchmark.

Names are imported on first use: reading results and drawing them needs no torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.evaluation.aggregate import EffectiveLength, effective_length, mean_over_checkpoints
    from ropewalk.evaluation.comparison import Difference, compare
    from ropewalk.evaluation.model_under_test import Subject
    from ropewalk.evaluation.probe import ProbeResult, candidate_methods
    from ropewalk.evaluation.prompt import PromptEncoder
    from ropewalk.evaluation.results import PositionBin, TaskResult
    from ropewalk.evaluation.rows import EvaluationRows, evaluation_rows, take_documents
    from ropewalk.evaluation.run import Stores, evaluate
    from ropewalk.evaluation.sample import Sample, Task
    from ropewalk.evaluation.settings import SUITES, Materials, Settings
    from ropewalk.evaluation.statistics import (
        mean_score_interval,
        ratio_interval,
        score_interval,
        wilson_interval,
    )
    from ropewalk.evaluation.tasks.perplexity import PerplexityResult, default_bins, perplexity_by_position

# The function probe bears its module's name and is imported from there.
_HOMES = {
    "SUITES": "settings",
    "Difference": "comparison",
    "EffectiveLength": "aggregate",
    "EvaluationRows": "rows",
    "Materials": "settings",
    "PerplexityResult": "tasks.perplexity",
    "PositionBin": "results",
    "ProbeResult": "probe",
    "PromptEncoder": "prompt",
    "Sample": "sample",
    "Settings": "settings",
    "Stores": "run",
    "Subject": "model_under_test",
    "Task": "sample",
    "TaskResult": "results",
    "mean_score_interval": "statistics",
    "ratio_interval": "statistics",
    "score_interval": "statistics",
    "candidate_methods": "probe",
    "compare": "comparison",
    "default_bins": "tasks.perplexity",
    "effective_length": "aggregate",
    "evaluate": "run",
    "evaluation_rows": "rows",
    "mean_over_checkpoints": "aggregate",
    "perplexity_by_position": "tasks.perplexity",
    "take_documents": "rows",
    "wilson_interval": "statistics",
}

__all__ = [
    "SUITES",
    "Difference",
    "EffectiveLength",
    "EvaluationRows",
    "Materials",
    "PerplexityResult",
    "PositionBin",
    "ProbeResult",
    "PromptEncoder",
    "Sample",
    "Settings",
    "Stores",
    "Subject",
    "Task",
    "TaskResult",
    "candidate_methods",
    "compare",
    "default_bins",
    "effective_length",
    "evaluate",
    "evaluation_rows",
    "mean_over_checkpoints",
    "mean_score_interval",
    "perplexity_by_position",
    "ratio_interval",
    "score_interval",
    "take_documents",
    "wilson_interval",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
