"""Evaluate models: sample -> prompt -> answer -> score -> statistics, with one module per benchmark.

Names are imported on first use, so reading results and drawing figures does not import torch.

Its files::

    settings          what is measured, on which model, over which server
    samples, prompt   a prompt with its references; prompts as token ids, never truncated
    tasks             the benchmarks, one module or package each
    backends          who answers, a model in memory or a server, and what counts the tokens of its prompts
    model_under_test  the model in memory, behind a server, or sharded over several processes
    run               the job: a checkpoint, the mean of several, or a server
    option_checks     options that contradict each other or the processes; the mesh of --parallel
    suite_loop        the loop over suites
    sample_cache      generated samples on disk, shared by models with the same tokenizer
    predictions       answers with their scores on disk, line by line, so that a run resumes
    excerpts          parts of a prompt, kept with its answer for people to read
    record            the folder of an evaluation: written, scored again, compared
    judging           a model on a server reads stored answers, and its grades become their scores
    agreement         what a result says of its judge, and how often others agree with it
    reproduction      what of a published result follows from its files
    results           plain values of a result, and a log of them
    score_rows        scores as rows, which tables, figures and data frames show
    aggregate         answers into results, results into summary figures
    statistics        95 % intervals
    student           Student's t distribution
    comparison        two evaluations on the same samples
    rows              long rows of documents, for perplexity
    rope_probe        the loss with several RoPE settings, before training
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.evaluation.aggregate import (
        EffectiveLength as EffectiveLength,
        effective_length as effective_length,
        mean_over_checkpoints as mean_over_checkpoints,
    )
    from ropewalk.evaluation.comparison import ScoreDifference as ScoreDifference, compare as compare
    from ropewalk.evaluation.suite_loop import Stores as Stores, evaluate_model as evaluate_model
    from ropewalk.evaluation.model_under_test import ModelUnderTest as ModelUnderTest
    from ropewalk.evaluation.rope_probe import (
        ProbedSetting as ProbedSetting,
        ProbeResult as ProbeResult,
        candidate_methods as candidate_methods,
        probe as probe,
    )
    from ropewalk.evaluation.prompt import PromptEncoder as PromptEncoder
    from ropewalk.evaluation.record import (
        ComparisonResult as ComparisonResult,
        EvaluationResult as EvaluationResult,
        compare_folders as compare_folders,
        rescore as rescore,
    )
    from ropewalk.evaluation.results import PositionBin as PositionBin, TaskResult as TaskResult
    from ropewalk.evaluation.rows import (
        EvaluationRows as EvaluationRows,
        evaluation_rows as evaluation_rows,
        take_documents as take_documents,
    )
    from ropewalk.evaluation.run import evaluate as evaluate
    from ropewalk.evaluation.samples import Sample as Sample, Task as Task
    from ropewalk.evaluation.settings import (
        CompareSettings as CompareSettings,
        EvaluationSettings as EvaluationSettings,
        Settings as Settings,
    )
    from ropewalk.evaluation.statistics import (
        mean_score_interval as mean_score_interval,
        ratio_interval as ratio_interval,
        score_interval as score_interval,
        wilson_interval as wilson_interval,
    )
    from ropewalk.evaluation.tasks.perplexity import (
        PerplexityResult as PerplexityResult,
        default_bins as default_bins,
    )
    from ropewalk.evaluation.tasks.registry import SUITES as SUITES
else:
    __getattr__, __dir__ = on_first_use(__name__)
