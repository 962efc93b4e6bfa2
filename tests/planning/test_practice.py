"""Advice from published runs: each has a source that can be followed, and the rate is the one that was stated."""

import re
from statistics import median_low

import pytest

from ropewalk.planning.practice import ADAPTER, PublishedRun, practice_for, published_runs

RUNS = published_runs()


def test_every_run_has_a_source_and_plausible_values() -> None:
    assert len({(run.model, run.target) for run in RUNS}) == len(RUNS)
    for run in RUNS:
        assert re.search(r"https://|arXiv:\d{4}\.\d{5}|technical report", run.source), run
        assert 1e-6 <= run.learning_rate <= 3e-3
        assert 1e7 < run.parameters < 1e12
        assert run.target is None or run.before is None or run.before < run.target
        assert run.tokens is None or 10**8 < run.tokens < 10**12


@pytest.mark.parametrize(
    ("parameters", "rate"),
    # SmolLM2 135M, Llama 3.2 1B, Llama 3.1 8B, Qwen3 14B and 32B, Llama 3.1 70B.
    [(135e6, 3e-4), (1.24e9, 2e-5), (8.03e9, 2e-5), (14.8e9, 2e-5), (32.8e9, 1e-5), (70.6e9, 1e-5)],
)
def test_the_rate_is_that_of_models_of_the_size(parameters: float, rate: float) -> None:
    found = practice_for(int(parameters))
    assert found.learning_rate == rate
    assert f"{rate:g}" in found.reason
    assert practice_for(int(parameters), adapter=True).learning_rate == ADAPTER * rate


def near(run: PublishedRun, size: int) -> bool:
    return size / 2.5 <= run.parameters <= 2.5 * size and not run.adapter


def test_finished_models_decide_by_their_median() -> None:
    size = 8 * 10**9
    finished = [run for run in RUNS if near(run, size) and not run.carries_on]
    found = practice_for(size)
    assert {run.model for run in found.runs} == {run.model for run in finished}
    assert found.learning_rate == median_low(run.learning_rate for run in finished)
    tokens = [run.tokens for run in finished if run.tokens is not None]
    assert found.least_tokens == min(tokens)
    assert found.tokens_words == (
        f"published runs of finished models of {min(run.parameters for run in found.told) / 1e9:.3g} to "
        f"{max(run.parameters for run in found.told) / 1e9:.3g} billion parameters took {min(tokens):,} to "
        f"{max(tokens):,} tokens"
    )
    # With what carries on pretraining, the highest rate would be ten times as much.
    others = [run.learning_rate for run in RUNS if near(run, size) and run.carries_on]
    assert max(others) > 10 * found.learning_rate


def test_where_no_finished_model_is_near_the_most_careful_run_decides() -> None:
    found = practice_for(500_000_000)
    assert all(run.carries_on for run in found.runs)
    assert found.learning_rate == min(run.learning_rate for run in found.runs)
    assert "the lowest of" in found.reason
    # Their tokens, a part of pretraining's, say nothing of what is enough.
    assert not {run.tokens for run in found.runs} & {found.least_tokens}


def test_a_model_of_unknown_size_is_taken_for_one_of_the_usual_size() -> None:
    assert practice_for(None) == practice_for(0) == practice_for(7 * 10**9)
