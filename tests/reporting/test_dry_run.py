"""What a planned run says: fit, time, memory, and warnings that name a line of code."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ropewalk.dry_run.run import Change, Wait
from ropewalk.reporting.dry_run import describe_planned_run
from ropewalk.reporting.tables import ResultTable
from ropewalk.training.simulation.memory import Tensor
from tests.dry_run.cases import planned_run


def text_of(result):
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in describe_planned_run(result):
        console.print(part.rich() if isinstance(part, ResultTable) else part)
    return out.getvalue()


def test_a_plan_that_fits():
    text = text_of(planned_run())
    assert "model on 8 x h100 (80 GB each)" in text
    assert "128k" in text
    assert "yes" in text
    assert "10 s" in text
    assert "72.0 GB are usable; the peak is on rank 0, in the backward" in text
    assert (
        "bound by matrix products (matrix products 50%, attention 20%, operators limited by memory bandwidth 10%, "
        "communication within attention 15%" in text
    )
    assert "attention is 25% of the step's 4e+15 operations" in text
    assert "sends 1.0 GB of parameters and gradients, 2.0 GB in Ulysses exchanges" in text
    assert "waits for the GPU twice in a step, never within a forward or backward" in text
    assert "an assumption" in text
    assert "warning" not in text
    # Parts that hold nothing have no line.
    assert "moments" not in text.split("Assumptions")[0].split("largest")[0]


def test_a_plan_of_recurrent_layers_has_their_operations_and_states():
    flops = {"dense": 3 * 10**15, "attention": 9 * 10**14, "recurrent": 10**14}
    text = text_of(planned_run(recurrent="the kernels of mamba-ssm", flops=flops))
    assert "attention is 22% and kernels of recurrent layers are 2.5% of the step's 4e+15 operations" in text
    assert "2.0 GB in Ulysses exchanges and of states in a step" in text
    whole = planned_run(recurrent="transformers' own code", sent={"shards": 10**9})
    assert "sends 1.0 GB of parameters and gradients in a step" in text_of(whole)


@pytest.mark.parametrize(
    ("cost", "shown"),
    [(0.17, "0.17"), (0.004, "< 0.01"), (12.5, "12.50"), (99.99, "99.99"), (4321.4, "4,321")],
)
def test_a_cost_is_shown_however_small(cost, shown):
    time = replace(planned_run().stages[0].time, cost=cost)
    stages = next(
        part for part in describe_planned_run(planned_run(time=time)) if isinstance(part, ResultTable)
    )
    assert stages.header[-1] == "cost"
    assert stages.rows[0][-1] == shown


def test_what_does_not_fit_names_the_change():
    changes = (
        Change("stages.0.offload_activations: true", None, False, "the adapter forbids it"),
        Change("16 GPUs", 40 * 10**9, True),
    )
    text = text_of(planned_run(fits=False, changes=changes))
    assert "stages.0.offload_activations: true does not suit the recipe: the adapter forbids it" in text
    assert "with 16 GPUs it fits (40.0 GB)" in text


def test_changes_are_said_to_include_those_before_them():
    first, second, third = "stages.0.a: true", "stages.0.b: 16k", "stages.0.c: true"
    changes = (
        Change(first, 10**11, False, settings={"a": True}),
        Change("stages.0.x: true", None, False, "the adapter forbids it"),
        Change(second, 9 * 10**10, False, settings={"a": True, "b": 16384}),
        Change(third, 10**10, True, settings={"a": True, "b": 16384, "c": True}),
    )
    text = text_of(planned_run(fits=False, changes=changes))
    assert f"with {first} it does not fit" in text
    assert f"with {first} and also {second} it does not fit" in text
    assert f"with {first} and {second} and also {third} it fits" in text
    statement = planned_run(fits=False, changes=changes).statement()
    assert f"stage 1: with {first} and {second} and also {third} it fits" in statement
    text = text_of(
        planned_run(
            spare=(replace(changes[0], fits=True, settings={"a": True}), replace(changes[2], fits=True))
        )
    )
    assert f"memory is free: {first} fits too" in text
    assert f"memory is free: {first} and also {second} fits too" in text


def test_what_attention_keeps_is_said_and_what_a_finer_mesh_would_save():
    text = text_of(planned_run(attention="results of attention are computed again in the backward"))
    assert "stage 1: results of attention are computed again in the backward" in text
    assert "auto took" not in text
    finer = Change("parallel: {sequence: 8}", 10**9, True, seconds=8.5)
    assert (
        "with parallel: {sequence: 8}, which has room to keep results of attention, a step takes 8.5 s instead of 10"
        in (text_of(planned_run(finer=finer)))
    )
    for other in (replace(finer, seconds=10.5), replace(finer, fits=False), replace(finer, seconds=None)):
        assert "auto took" not in text_of(planned_run(finer=other))


def test_times_are_said_to_be_those_of_training_alone():
    words = "time and cost are those of the training steps, without packing, evaluations and export"
    assert words in text_of(planned_run())
    assert words not in text_of(planned_run(time=None))


def test_mistakes_are_named_with_their_line():
    result = planned_run(waits=(Wait("mine.py:7 forward", "forward", 32),))
    stage = result.stages[0]
    logits = Tensor("logits", 10**10, (131072, 32000), "float32", "aten.mm", "mine.py:9 loss")
    object.__setattr__(stage.memory, "full_logits", (logits,))
    text = text_of(result)
    assert "warning: the host waits for the GPU 32 times in the forward, at mine.py:7 forward" in text
    assert "warning: the logits of all tokens are held at once, 131072 x 32000 float32 (10.0 GB)" in text


@pytest.mark.parametrize("device", ["cpu"])
def test_without_known_speed_there_is_no_time(device):
    text = text_of(planned_run(time=None, device=device))
    assert "tokens/s" not in text
    assert "bound by" not in text
    assert "waits" not in text


@pytest.mark.parametrize(
    ("of_the_step", "said"),
    [
        (0.92, ", and a step takes 8 % less time"),
        (0.999, ", but saves no time"),
        (1.01, ", but saves no time"),
    ],
)
def test_free_memory_is_worth_its_time(of_the_step, said):
    plan = planned_run()
    stage = plan.stages[0]
    change = Change("stages.0.x: false", 10**9, True, seconds=of_the_step * stage.time.seconds)
    text = text_of(replace(plan, stages=(replace(stage, spare=(change,)), *plan.stages[1:])))
    assert f"memory is free: stages.0.x: false fits too (1.0 GB){said}\n" in text
