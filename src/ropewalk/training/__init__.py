"""Long-context training: recipes, stages, optimizer steps and checkpoints.

Its files::

    recipe         everything that decides a run, as a person writes it
    preflight      refuse before the work starts what would fail later
    resolved       a recipe with every ``auto`` resolved
    run            the main job as a list of steps, from a recipe to an extended checkpoint
    run_state      what the steps of a run share
    taking_up      may a run start or resume in its folder, and what it verifies first
    folder         names in a run's folder, and how far the run in it came
    so_far         how far a run has come, for those who watch it
    summary        the result of a run
    copied         the run's copy at a URL
    documents      packed rows to train on, held-out documents to evaluate on
    answers        answers of a run or an evaluation, and their whole prompts made again
    measurement    evaluation before, during and after training
    stage          one stage: from a checkpoint to a checkpoint at its context
    stage_rope     a stage's RoPE: given, from a table, searched or chosen
    stage_engine   ``engine: auto``: the engines timed on a stage's first rows
    update         one optimizer step: gradients, AdamW, and what it took
    checkpoint     checkpoints of one process and of several
    final_weights  which checkpoints are exported: last, best, or a mean
    softmax_scale  the scale of the scores that is best for long texts without RoPE, measured and exported
    export_step    the model as it was after a step
    metrics        one line a step, and experiment trackers
    simulation     the same step on tensors without data: memory, operations, bytes sent
    memory_need    memory and time that a stage needs on a rank, from a remembered dry run
    mesh_choice    ``parallel: auto``: the coarsest split that fits
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.data.collator import RowCollator as RowCollator
    from ropewalk.training.recipe.file import load_recipe as load_recipe
    from ropewalk.training.recipe.recipe import Recipe as Recipe
    from ropewalk.training.run import extend as extend, extend_until as extend_until
    from ropewalk.training.summary import RunResult as RunResult, StoppedRun as StoppedRun
else:
    __getattr__, __dir__ = on_first_use(__name__)
