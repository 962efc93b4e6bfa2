"""The benchmark of search algorithms: its toy, its shared losses, and what it calls reached."""

import math

import pytest

from ropewalk.search import Candidate, Job, Measured, Minimum
from ropewalk.search.loop import Trace
from tests.search.toy_objective import ToyEvaluator

benchmark = pytest.importorskip(
    "benchmarks.search", reason="benchmarks are found from the root of the checkout only"
)


def result(*found):
    traces = tuple(Trace(forwards, Measured(Candidate((1.0,)), value, 1)) for forwards, value in found)
    return Minimum(
        min((each.measured for each in traces), key=lambda each: each.objective), traces, 100, 9, True
    )


def test_forwards_to_a_reference_by_seed_and_their_median():
    paper = [result((10, 3.0), (60, 2.0)), result((10, 3.0), (90, 2.5)), result((10, 3.0), (100, 1.0))]
    other = [result((5, 3.0), (20, 1.9)), result((5, 2.6), (30, 2.5)), result((5, 3.0))]
    rows = {
        (each["variant"], each["of_its_budget"]): each
        for each in benchmark.compared({"paper": paper, "other": other}, "paper", (0.5, 1.0))
    }
    assert rows["paper", 1.0]["forwards"] == [60, 90, 100]
    assert rows["other", 1.0]["forwards"] == [20, 30, None]
    assert rows["other", 1.0]["median"] == 30
    # By half of its budget the reference had only its first.
    assert rows["other", 0.5]["forwards"] == [5, 5, 5]


def test_a_median_that_was_not_reached_is_none():
    rows = benchmark.compared({"paper": [result((10, 1.0))], "other": [result((10, 2.0))]}, "paper", (1.0,))
    assert [each["median"] for each in rows] == [10, None]


def test_the_toy_is_least_at_the_mean_of_its_documents():
    toy = benchmark.Toy(8, 8.0, seed=1)

    def objective(logs):
        jobs = [Job(Candidate(tuple(math.exp(each) for each in logs)), i) for i in range(toy.n_documents)]
        return toy.objective([loss for _, loss in toy.losses(jobs)])

    centre = toy.centres.mean(0)
    least = objective(centre)
    for pair in range(8):
        for step in (-0.01, 0.01):
            moved = centre.copy()
            moved[pair] += step
            assert objective(moved) > least


def test_shared_losses_are_measured_once_and_read_back(tmp_path):
    optimum = Candidate((1.0, 2.0))
    inner = ToyEvaluator(optimum)
    jobs = [Job(optimum, 0), Job(Candidate((1.0, 3.0)), 1)]
    inner.loss = lambda job: math.inf if job.document else 1.5
    shared = benchmark.Shared(inner, tmp_path / "losses.jsonl")
    first = list(shared.losses(jobs))
    assert list(shared.losses(jobs)) == first == [(jobs[0], 1.5), (jobs[1], math.inf)]
    again = ToyEvaluator(optimum)
    assert list(benchmark.Shared(again, tmp_path / "losses.jsonl").losses(jobs)) == first
    assert again.asked == []


def test_variants_and_their_budgets_can_be_told():
    problem = benchmark.PROBLEMS["stories-2048"]
    assert set(benchmark.budgets_of(problem, None).values()) == {problem.budget}
    told = benchmark.budgets_of(problem, "evolution:600,cma-es + racing:300")
    assert {variant.name: budget for variant, budget in told.items()} == {
        "evolution": 600,
        "cma-es + racing": 300,
    }
