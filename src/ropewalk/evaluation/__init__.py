"""Evaluate models: sample -> prompt -> answer -> score -> statistics, with one module per benchmark.

Names are imported on first use, so reading results and drawing figures does not import torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.evaluation.aggregate import EffectiveLength, effective_length, mean_over_checkpoints
    from ropewalk.evaluation.comparison import ScoreDifference, compare
    from ropewalk.evaluation.measure import Stores, evaluate_model
    from ropewalk.evaluation.model_under_test import ModelUnderTest
    from ropewalk.evaluation.probe import ProbedSetting, ProbeResult, candidate_methods
    from ropewalk.evaluation.prompt import PromptEncoder
    from ropewalk.evaluation.record import ComparisonResult, EvaluationResult, compare_folders, rescore
    from ropewalk.evaluation.results import PositionBin, TaskResult
    from ropewalk.evaluation.rows import EvaluationRows, evaluation_rows, take_documents
    from ropewalk.evaluation.run import evaluate
    from ropewalk.evaluation.samples import Sample, Task
    from ropewalk.evaluation.settings import CompareSettings, EvaluationSettings, Settings
    from ropewalk.evaluation.statistics import (
        mean_score_interval,
        ratio_interval,
        score_interval,
        wilson_interval,
    )
    from ropewalk.evaluation.tasks.perplexity import PerplexityResult, default_bins, perplexity_by_position
    from ropewalk.evaluation.tasks.registry import SUITES

# The function `probe` is missing here because it shares its name with its module: import it from there.
_HOMES = {
    "SUITES": "tasks.registry",
    "ScoreDifference": "comparison",
    "EffectiveLength": "aggregate",
    "EvaluationRows": "rows",
    "CompareSettings": "settings",
    "ComparisonResult": "record",
    "EvaluationResult": "record",
    "compare_folders": "record",
    "rescore": "record",
    "EvaluationSettings": "settings",
    "evaluate": "run",
    "PerplexityResult": "tasks.perplexity",
    "PositionBin": "results",
    "ProbeResult": "probe",
    "ProbedSetting": "probe",
    "PromptEncoder": "prompt",
    "Sample": "samples",
    "Settings": "settings",
    "Stores": "measure",
    "ModelUnderTest": "model_under_test",
    "Task": "samples",
    "TaskResult": "results",
    "mean_score_interval": "statistics",
    "ratio_interval": "statistics",
    "score_interval": "statistics",
    "candidate_methods": "probe",
    "compare": "comparison",
    "default_bins": "tasks.perplexity",
    "effective_length": "aggregate",
    "evaluate_model": "measure",
    "evaluation_rows": "rows",
    "mean_over_checkpoints": "aggregate",
    "perplexity_by_position": "tasks.perplexity",
    "take_documents": "rows",
    "wilson_interval": "statistics",
}

__all__ = [
    "SUITES",
    "CompareSettings",
    "ComparisonResult",
    "EffectiveLength",
    "EvaluationResult",
    "EvaluationRows",
    "EvaluationSettings",
    "ModelUnderTest",
    "PerplexityResult",
    "PositionBin",
    "ProbeResult",
    "ProbedSetting",
    "PromptEncoder",
    "Sample",
    "ScoreDifference",
    "Settings",
    "Stores",
    "Task",
    "TaskResult",
    "candidate_methods",
    "compare",
    "compare_folders",
    "default_bins",
    "effective_length",
    "evaluate",
    "evaluate_model",
    "evaluation_rows",
    "mean_over_checkpoints",
    "mean_score_interval",
    "perplexity_by_position",
    "ratio_interval",
    "rescore",
    "score_interval",
    "take_documents",
    "wilson_interval",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
