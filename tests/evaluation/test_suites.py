"""evaluate: every suite, every length, in order; what cannot run is said and never scored."""

import json
import math
from typing import Any

import numpy as np
import pytest

from evaluation_cases import tiny_llama, word_tokenizer
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import check_suites, evaluate
from ropewalk.integrations.models import attach

DOCUMENTS = [np.random.default_rng(3).integers(0, 250, size=n) for n in (300, 90, 400)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    model = tiny_llama(vocab_size=len(tokenizer))
    attach(model)
    return model


def test_every_suite_at_every_length(model: Any, tokenizer: Any) -> None:
    told: list[tuple[str, int, int]] = []
    results = evaluate(
        model,
        tokenizer,
        DOCUMENTS,
        [96, 192],
        samples=2,
        rows=3,
        progress=lambda *call: told.append(call),
    )
    assert [(r.suite, r.task, r.length, r.status) for r in results] == [
        ("perplexity", "perplexity", 96, "ok"),
        ("perplexity", "perplexity", 192, "ok"),
        ("passkey", "passkey", 96, "ok"),
        ("passkey", "passkey", 192, "ok"),
    ]
    short, long, passkeys = results[0], results[1], results[2:]
    assert [each.end for each in long.positions] == [64, 128, 192]
    assert short.n == long.n == 3
    assert short.score > 0
    assert long.details == {
        "rows": "packed",
        "n_tokens": long.details["n_tokens"],
        "max_position_embeddings": 64,
        "beyond_config": True,
    }
    for result in passkeys:
        assert result.n == len(result.predictions) == 2
        assert result.details["beyond_config"]
        assert result.details["bos_count"] == [1]
        assert result.details["prompt_tokens"][1] <= result.length - 10
        assert {"key", "prediction", "correct", "depth", "prompt_tokens"} <= set(result.predictions[0])
    for result in results:
        json.dumps(result.to_json(), allow_nan=False)
    assert told[0] == ("perplexity at 96 tokens", 1, 3)
    assert told[-1] == ("passkey", 4, 4)


def test_lengths_may_differ_by_suite_and_bins_follow_the_trained_length(model: Any, tokenizer: Any) -> None:
    lengths = {"perplexity": [96], "passkey": [128]}
    suites = ["passkey", "perplexity"]
    results = evaluate(model, tokenizer, DOCUMENTS, lengths, suites, 1, rows=2, trained_length=32)
    assert [(result.suite, result.length) for result in results] == [("passkey", 128), ("perplexity", 96)]
    assert [each.end for each in results[1].positions] == [32, 64, 96]


def test_perplexity_without_text_is_not_run(model: Any, tokenizer: Any) -> None:
    (result,) = evaluate(model, tokenizer, None, [96], ["perplexity"])
    assert (result.status, result.reason, result.n) == ("not run", "no text was given", 0)
    assert math.isnan(result.score)


def test_impossible_lengths_are_refused_before_anything_runs(model: Any, tokenizer: Any) -> None:
    told: list[Any] = []
    for lengths, message in (([96, 16], "passkey does not fit in 16"), ([96, 4096], "too few for one row")):
        with pytest.raises(RopewalkError, match=message):
            evaluate(model, tokenizer, DOCUMENTS, lengths, progress=lambda *call: told.append(call))
    assert not told


def test_unknown_suite_names_the_nearest() -> None:
    check_suites(["perplexity", "passkey"])
    with pytest.raises(RopewalkError, match="unknown suite 'passkeys'; did you mean passkey"):
        check_suites(["perplexity", "passkeys"])
    with pytest.raises(RopewalkError, match="unknown suite 'x'; choose from perplexity, passkey"):
        check_suites(["x"])
    with pytest.raises(RopewalkError, match="no suite given"):
        check_suites([])
