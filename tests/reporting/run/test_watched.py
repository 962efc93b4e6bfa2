"""A run while it trains, as lines and as a page."""

from dataclasses import replace
from pathlib import Path

import pytest

from ropewalk.reporting.run.watched import describe_watched, facts_of, scores_of, write_watched_page
from ropewalk.training.so_far import RunSoFar, ScoreSoFar

TRAINING = RunSoFar(
    run=Path("runs/books"),
    model="llama",
    state="training",
    stage=1,
    stages=2,
    step=40,
    steps=500,
    context=2**15,
    losses=(3.0, None, 2.5),
    tokens=120_000,
    tokens_per_second=1000.0,
    memory=71 * 10**9,
    seconds_left=3661.0,
    silent_seconds=5.0,
    measured=(
        ScoreSoFar("before", "passkey/32768", 0.0),
        ScoreSoFar("before", "perplexity/32768", None),
        ScoreSoFar("stage 1, step 40", "passkey/32768", 95.0),
    ),
)


def test_what_a_run_does_is_said_a_line_each():
    assert facts_of(TRAINING) == {
        "run": "runs/books",
        "model": "llama",
        "state": "training",
        "stage": "1 of 2, rows of 32k tokens",
        "step": "40 of 500",
        "loss": "2.5000 (first 3.0000, least 2.5000)",
        "tokens": "120,000",
        "tokens/s": "1,000",
        "memory": "71.0 GB at the peak",
        "time left": "1:01:01 or more, because later rows are longer, without evaluations",
    }
    alone = facts_of(replace(TRAINING, stages=1, losses=(3.0, None)))
    assert (alone["stage"], alone["loss"]) == (
        "rows of 32k tokens",
        "not finite (first 3.0000, least 3.0000)",
    )
    assert alone["time left"] == "1:01:01, without evaluations"


@pytest.mark.parametrize(("silent", "told"), [(399.0, False), (401.0, True)])
def test_a_run_without_a_step_for_ten_steps_may_have_stopped(silent, told):
    # 40,000 tokens a step take 40 seconds.
    state = facts_of(replace(TRAINING, silent_seconds=silent))["state"]
    assert ("no step for 0:06:41" in state) == told


def test_scores_stand_in_the_order_of_training():
    table = scores_of(TRAINING)
    assert table.header == ("task", "before", "stage 1, step 40")
    assert table.rows == (("passkey/32768", "0", "95"), ("perplexity/32768", "–", "–"))
    assert list(describe_watched(TRAINING))[-1] == table
    assert scores_of(replace(TRAINING, measured=())) is None


def test_the_page_reloads_itself_until_the_run_ends(tmp_path):
    for state, reloads in (("training", True), ("finished", False)):
        write_watched_page(replace(TRAINING, state=state, model="<b>"), tmp_path / "w.html", 7.0)
        text = (tmp_path / "w.html").read_text()
        assert ('<meta http-equiv="refresh" content="7">' in text) == reloads
        assert "&lt;b&gt;" in text
        assert "<b>" not in text
        assert "data:image/svg+xml" in text
    write_watched_page(replace(TRAINING, losses=(None,)), tmp_path / "w.html", 7.0)
    assert "data:image/svg+xml" not in (tmp_path / "w.html").read_text()
