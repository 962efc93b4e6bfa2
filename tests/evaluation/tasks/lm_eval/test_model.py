"""The model as lm_eval calls it: what it cuts, batches and caches, and what ends a run."""

import logging
import warnings

import lm_eval.api.task
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers.utils import logging as transformers_logging

from ropewalk.errors import RunFailure
from ropewalk.evaluation.tasks.lm_eval.model import HarnessModel, cut, quiet_libraries
from ropewalk.rope import Default, RotaryEmbedding, RotaryRows
from tests.harness_cases import Parrot, harness_model, harness_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return harness_tokenizer()


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 25), st.booleans())
def test_a_cut_prompt_keeps_its_ends_and_fills_the_room(ids, most, middle):
    kept = cut(ids, most, middle)
    assert len(kept) == min(len(ids), most)
    head = len(kept) // 2 if middle and len(ids) > most else 0
    if len(ids) <= most:
        assert kept == ids
    else:
        assert kept[:head] == ids[:head]
        assert kept[head:] == ids[len(ids) - (most - head) :]


def test_batches_equal_lm_evals_own_where_nothing_is_cut_in_the_middle(tokenizer):
    ours = HarnessModel(harness_model(), tokenizer, 64, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = HFLM(pretrained=harness_model(), tokenizer=harness_tokenizer(), max_length=64)
    texts = ["A short one", "one that is rather longer than the others", "<s>its own BOS"]
    for group, most in ((texts[:2], None), (texts[:2], 40), (texts[:2], 5), (texts[2:], 30)):
        (a, mask_a), (b, mask_b) = (
            each.tok_batch_encode(group, left_truncate_len=most) for each in (ours, theirs)
        )
        assert torch.equal(a, b)
        assert torch.equal(mask_a, mask_b)
    assert ours.truncated == {texts[0], texts[1]}


def requests(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("t", n, 1))
        for n, each in enumerate(arguments)
    ]


def test_what_lm_eval_calls_passes_through_the_wrapper(tokenizer):
    """The methods that are replaced are lm_eval's own affair; it must still call them, with such arguments."""
    parrot = Parrot(tokenizer, [])
    model = HarnessModel(parrot.eval(), tokenizer, 40, 3)
    model.middle = True
    told = []
    model.progress = lambda *counts: told.append(counts)
    prompts = [chr(97 + n) * (20 + 10 * n) for n in range(4)]
    settings = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.5, "top_p": 0.5}
    answers = model.generate_until(requests("generate_until", [(p, settings) for p in prompts]))
    assert answers == [" sailor 1"] * 4
    assert model.truncated == set(prompts[1:])
    expected = [cut(tokenizer(prompt)["input_ids"], 30, True) for prompt in prompts]
    assert sorted(parrot.read) == sorted(expected)
    assert told == [(n, 4) for n in range(1, 5)]
    assert not any(each["do_sample"] for each in parrot.asked)
    # Three prompts of at most 30 tokens, then the shortest of 21, with room for 10 more.
    assert [each["max_length"] for each in parrot.asked] == [40, 31]
    model.truncated.clear()
    model.loglikelihood(requests("loglikelihood", [("ab" * 20, " x"), ("ab", " x")]))
    assert model.truncated == {("ab" * 20, " x")}


@pytest.mark.parametrize("rotary", [RotaryEmbedding(Default(8, 1e4)), RotaryRows([Default(8, 1e4)])])
def test_cached_keys_are_rotated_as_the_whole_answer_will_be(tokenizer, rotary):
    parrot = Parrot(tokenizer, []).eval()
    parrot.rotary = rotary
    model = HarnessModel(parrot, tokenizer, 64, 1)
    lengths = []
    inner, forward = parrot.generate, parrot.forward
    parrot.generate = lambda **named: lengths.append(parrot.rotary.total_length) or inner(**named)
    parrot.forward = lambda ids: lengths.append(parrot.rotary.total_length) or forward(ids)
    model.generate_until(requests("generate_until", [("abcd", {"until": [], "max_gen_toks": 10})]))
    model.loglikelihood(requests("loglikelihood", [("abcd", " x")]))
    # BOS and four letters with ten new tokens; BOS, four letters and the space before the x.
    assert lengths == [15, 6]
    assert parrot.rotary.total_length is None


def test_an_answer_that_cannot_be_scored_ends_the_run(tokenizer):
    model = HarnessModel(harness_model(), tokenizer, 8, 1)
    for answer, length in (("", 0), ("123456789", 9)):
        with pytest.raises(RunFailure, match=f"got an answer of {length}$"):
            model.loglikelihood(requests("loglikelihood", [("q", answer)]))


def test_the_tokenizer_gets_no_padding_token(tokenizer):
    model = HarnessModel(harness_model(), tokenizer, 8, 1)
    assert model.tokenizer.pad_token is not None
    assert tokenizer.pad_token is None


def test_quiet_ends_and_hides_only_what_is_named(capfd):
    before = (logging.getLogger("lm_eval").level, transformers_logging.get_verbosity(), lm_eval.api.task.tqdm)
    with quiet_libraries():
        logging.getLogger("lm_eval.tasks").error("nobody is to see this")
        list(lm_eval.api.task.tqdm(range(3), total=3))
        warnings.warn("Using slow pure-python SequenceMatcher. And so on", UserWarning, stacklevel=1)
        with pytest.warns(UserWarning, match="anything else"):
            warnings.warn("anything else", UserWarning, stacklevel=1)
    after = (logging.getLogger("lm_eval").level, transformers_logging.get_verbosity(), lm_eval.api.task.tqdm)
    assert after == before
    assert capfd.readouterr() == ("", "")
