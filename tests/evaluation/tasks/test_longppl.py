"""LongPPL against a reading of every token by itself, and against a model whose key tokens are known."""

import json
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Fuse
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split, WhitespaceSplit
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from torch import nn
from transformers import PreTrainedTokenizerFast

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation import TaskResult, ratio_interval
from ropewalk.evaluation.backends.likelihoods import WindowReader
from ropewalk.evaluation.tasks.longppl import (
    ITSELF,
    Evaluator,
    KeyTokenRule,
    key_tokens,
    long_perplexity,
    longppl_task,
    mapped_key_tokens,
    read_with_offsets,
    readings,
    short_windows,
)
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.load import attach
from tests.evaluation.evaluation_cases import tiny_llama
from tests.evaluation.ruler_cases import demo_tokenizer

BOS, VOCABULARY = 1, 97


@cache
def word_tokenizer(bos: int | None) -> Any:
    """Reads ``w03 w17`` as 3, 17; equally long, so that BOS stands in no other word."""
    words = Tokenizer(WordLevel({f"w{number:02}": number for number in range(VOCABULARY)}, unk_token="w00"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=None if bos is None else f"w{bos:02}")


# Losses of about 5 nats in float32, 1e-6 each, averaged.
FLOAT32 = 1e-5


def text(*lengths: int, seed: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, size=n).astype(np.uint16) for n in lengths]


def attached(seed: int = 0) -> tuple[Any, OutputHead]:
    model = tiny_llama(seed=seed)
    attach(model)
    return model, OutputHead.of(model)


@pytest.fixture(scope="module")
def own() -> tuple[Any, OutputHead]:
    return attached()


@pytest.fixture(scope="module")
def other() -> tuple[Any, OutputHead]:
    return attached(seed=1)


@pytest.fixture(scope="module")
def plain() -> dict[int, Any]:
    return {seed: tiny_llama(seed=seed) for seed in (0, 1)}


def log_p(plain: Any, context: list[int], token: int) -> float:
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([context])).logits[0, -1].double()
    return float(torch.log_softmax(logits, dim=-1)[token])


def naive(
    plain: Any,
    chooser: Any,
    document: Any,
    bos: int | None,
    length: int,
    short: int,
    step: int,
    alpha: float,
    beta: float,
) -> list[float]:
    """Losses of the key tokens, each of them predicted by itself from its long and from its short context."""
    head = [] if bos is None else [bos]
    ids, losses = document.tolist()[: length - len(head)], []
    for j in range(short, len(ids)):
        start = (j - short) // step * step
        long_context, short_context = head + ids[:j], head + ids[start:j]
        assert short + len(head) <= len(short_context) < short + step + len(head)
        long = log_p(chooser, long_context, ids[j])
        if long - log_p(chooser, short_context, ids[j]) > alpha and long > beta:
            losses.append(-log_p(plain, long_context, ids[j]))
    return losses


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.integers(2, 40), min_size=0, max_size=1),
    st.integers(12, 30),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([BOS, None]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_equals_a_reading_of_every_token_by_itself(
    own: tuple[Any, OutputHead],
    other: tuple[Any, OutputHead],
    plain: dict[int, Any],
    lengths: list[int],
    length: int,
    short: int,
    step: int,
    bos: int | None,
    itself: bool,
    chunk: int | None,
) -> None:
    alpha, beta = 0.2, -6.0
    documents = text(*lengths, 37)
    evaluator = None if itself else Evaluator("other", *other, word_tokenizer(bos))
    found = long_perplexity(
        WindowReader(*own, bos, prefill_chunk=chunk),
        documents,
        KeyTokenRule(length, short, step, alpha, beta),
        evaluator=evaluator,
        tokenizer=word_tokenizer(bos),
    )
    chooser = plain[0] if itself else plain[1]
    expected = [
        naive(plain[0], chooser, document, bos, length, short, step, alpha, beta) for document in documents
    ]
    by_index = {each.index: each for each in found.documents}
    for index, losses in enumerate(expected):
        if index not in by_index:
            assert not losses
            continue
        assert by_index[index].tokens == len(losses)
        assert by_index[index].nats == pytest.approx(sum(losses), rel=FLOAT32)
    together = [loss for losses in expected for loss in losses]
    assert found.n_key_tokens == len(together)
    if together:
        assert found.perplexity == pytest.approx(math.exp(sum(together) / len(together)), rel=FLOAT32)
    else:
        assert math.isnan(found.perplexity)


def test_naive_reading_finds_some(plain: dict[int, Any]) -> None:
    losses = naive(plain[0], plain[0], text(37)[0], BOS, 30, 4, 2, 0.2, -6.0)
    assert 2 <= len(losses) <= 20


class Recalling(nn.Module):
    """Says with logit ``sure`` what came after the last earlier occurrence of a token; else it knows nothing."""

    def __init__(self, sure: float) -> None:
        super().__init__()
        self.sure = sure
        self.device = torch.device("cpu")
        self.rows: list[list[int]] = []

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        hidden = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            self.rows.append(ids)
            for t in range(len(ids)):
                earlier = [s for s in range(t) if ids[s] == ids[t]]
                if earlier:
                    hidden[row, t, ids[earlier[-1] + 1]] = self.sure
        return SimpleNamespace(last_hidden_state=hidden)


def identity() -> OutputHead:
    linear = nn.Linear(VOCABULARY, VOCABULARY, bias=False)
    nn.init.eye_(linear.weight)
    return OutputHead(linear)


def needle(distance: int) -> np.ndarray:
    """Distinct tokens but for the pair (3, 4), which comes first and again so many tokens later."""
    return np.array([3, 4, *range(10, 8 + distance), 3, 4, 90, 91])


def loss_of(sure: float, said: bool = True) -> float:
    return math.log(math.exp(sure) + VOCABULARY - 1) - (sure if said else 0.0)


def test_key_token_is_what_only_the_long_context_tells() -> None:
    model = Recalling(sure=8.0)
    found = long_perplexity(
        WindowReader(model, identity(), BOS), [needle(30), needle(9)], KeyTokenRule(64, 8, 4)
    )
    # In the second text the pair is 9 tokens back, and its token sees 10.
    assert [d.tokens for d in found.documents] == [1, 0]
    assert found.perplexity == pytest.approx(math.exp(loss_of(8.0)))
    assert found.n_compared == 34 - 12 + 13 - 12
    assert found.share == pytest.approx(1 / found.n_compared)
    losses = [math.log(VOCABULARY)] * (34 + 13 - 2) + [loss_of(8.0)] * 2
    # The token after the second 4 is foretold to be what came after the first.
    losses += [loss_of(8.0, False) - math.log(VOCABULARY)] * 2
    assert found.overall == pytest.approx(math.exp(sum(losses) / 47))
    assert model.rows[0] == [BOS, *needle(30).tolist()]
    assert all(row[0] == BOS for row in model.rows)
    assert max(map(len, model.rows[1:7])) == 1 + 8 + 4


def test_only_beginnings_as_long_as_the_length_are_read() -> None:
    model = Recalling(sure=8.0)
    found = long_perplexity(WindowReader(model, identity(), BOS), [needle(30)], KeyTokenRule(33, 8, 4))
    assert found.n_key_tokens == 1
    assert max(map(len, model.rows)) == 33
    assert (
        long_perplexity(
            WindowReader(model, identity(), BOS), [needle(30)], KeyTokenRule(32, 8, 4)
        ).n_key_tokens
        == 0
    )


def test_thresholds_are_strict() -> None:
    long, short = np.array([1.0, 1.0, 2.0, 1.9, 0.5]), np.array([3.0, 3.1, 9.0, 9.0, 1.0])
    assert key_tokens(long, short, 2.0, -2.0).tolist() == [False, True, False, True, False]


def test_alpha_and_beta_choose_fewer() -> None:
    model, head, documents = Recalling(sure=8.0), identity(), [needle(30)]
    spared = math.log(VOCABULARY) - loss_of(8.0)
    assert (
        long_perplexity(
            WindowReader(model, head, BOS), documents, KeyTokenRule(64, 8, 4, alpha=spared - 0.01)
        ).n_key_tokens
        == 1
    )
    assert (
        long_perplexity(
            WindowReader(model, head, BOS), documents, KeyTokenRule(64, 8, 4, alpha=spared + 0.01)
        ).n_key_tokens
        == 0
    )
    below = -loss_of(8.0)
    assert (
        long_perplexity(
            WindowReader(model, head, BOS), documents, KeyTokenRule(64, 8, 4, beta=below - 0.01)
        ).n_key_tokens
        == 1
    )
    assert (
        long_perplexity(
            WindowReader(model, head, BOS), documents, KeyTokenRule(64, 8, 4, beta=below + 0.01)
        ).n_key_tokens
        == 0
    )


def test_evaluator_chooses_and_the_model_is_scored() -> None:
    sure, unsure = Recalling(sure=8.0), Recalling(sure=1.0)
    evaluator = Evaluator("sure", sure, identity(), word_tokenizer(BOS), max_position_embeddings=35)
    calls: list[tuple[int, int]] = []
    found = long_perplexity(
        WindowReader(unsure, identity(), BOS),
        [needle(30)],
        KeyTokenRule(64, 8, 4),
        evaluator=evaluator,
        tokenizer=word_tokenizer(BOS),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert found.perplexity == pytest.approx(math.exp(loss_of(1.0)))
    task = longppl_task(found)
    assert found.evaluator == task.details["evaluator"] == "sure"
    assert (task.details["mapping"], task.details["evaluator_tokens"], task.reason) == (
        "characters",
        35,
        None,
    )
    assert len(unsure.rows) == 1
    assert calls == [(done, 8) for done in range(1, 9)]
    assert (
        long_perplexity(
            WindowReader(unsure, identity(), BOS), [needle(30)], KeyTokenRule(64, 8, 4)
        ).n_key_tokens
        == 0
    )
    with pytest.raises(RopewalkError, match=r"evaluator 'sure' .* needs the model's tokenizer too"):
        long_perplexity(
            WindowReader(unsure, identity(), BOS), [needle(30)], KeyTokenRule(64, 8, 4), evaluator=evaluator
        )
    assert len(unsure.rows) == 1 + 7
    beyond = replace(found, evaluator_stated=34)
    assert (
        longppl_task(beyond).reason
        == "the evaluator sure read up to 35 tokens, more than the 34 of its config"
    )


def test_key_tokens_of_another_tokenizer_are_found_by_their_characters() -> None:
    """The model reads letters where the evaluator reads words: the key word is as many key letters."""
    letters = Tokenizer(
        WordLevel({**{f"{n}": n + 2 for n in range(10)}, "w": 12, " ": 13, "?": 14}, unk_token="?")
    )
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    letters.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    text = word_tokenizer(BOS).decode(needle(30).tolist())
    document = np.array(tokenizer(text)["input_ids"])
    model = Recalling(sure=0.0)
    evaluator = Evaluator("words", Recalling(sure=8.0), identity(), word_tokenizer(BOS))
    found = long_perplexity(
        WindowReader(model, identity(), None),
        [document],
        KeyTokenRule(len(document), 8, 4),
        evaluator=evaluator,
        tokenizer=tokenizer,
    )
    # The key word is the second " w04", of four letters; the model without BOS says all of them alike.
    assert found.documents[0].tokens == found.n_key_tokens == 4
    assert found.perplexity == pytest.approx(VOCABULARY)
    # Compared are all letters from the word on that is the evaluator's first with a short context.
    first = " ".join(text.split(" ")[:12])
    assert found.documents[0].compared == len(text) - len(first)
    assert found.documents[0].all_tokens == len(document) - 1
    cut = len(first) + 1
    with pytest.raises(
        RopewalkError,
        match=r"more than 12 tokens .* of the evaluator 'words'; after truncation to \d+ tokens .* has 12$",
    ):
        long_perplexity(
            WindowReader(model, identity(), None),
            [document],
            KeyTokenRule(cut, 8, 4),
            evaluator=evaluator,
            tokenizer=tokenizer,
        )


def test_a_token_that_sticks_out_is_no_key_token() -> None:
    chooser = np.array([[0, 2], [2, 5], [5, 6], [6, 9]])
    spans = np.array([[0, 0], [0, 1], [1, 2], [2, 6], [3, 5], [5, 7], [6, 9], [2, 2], [2, 9]])
    for chosen, expected in (
        ([0, 1, 1, 0], [2, 6, 3, 5]),
        ([1, 0, 0, 1], [0, 1, 1, 2, 6, 9]),
        ([0, 1, 0, 1], [3, 5, 6, 9]),
        ([0, 1, 1, 1], [2, 6, 3, 5, 5, 7, 6, 9, 2, 9]),
        ([0, 0, 0, 0], []),
    ):
        found = spans[mapped_key_tokens(np.array(chosen, dtype=bool), chooser, spans)]
        assert found.flatten().tolist() == expected, chosen


def tokenizers() -> dict[str, Any]:
    """Bytes with offsets of whole characters, with and without white space in them; words; and a real one."""
    found = {}
    for trim in (False, True):
        merges = [("Ġ", "a"), ("Ġa", "b"), ("a", "b"), ("Ã", "¼")]
        letters = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
        plain = Tokenizer(BPE({each: number for number, each in enumerate(letters)}, merges))
        plain.pre_tokenizer = ByteLevel(add_prefix_space=False)
        plain.decoder = ByteLevelDecoder()
        plain.post_processor = ByteLevelProcessor(trim_offsets=trim)
        found[f"bytes, trim {trim}"] = PreTrainedTokenizerFast(tokenizer_object=plain)
    found["demo"] = demo_tokenizer()
    return found


TOKENIZERS = tokenizers()
TEXTS = st.text(st.sampled_from("ab cü漢😀\n\t."), min_size=1, max_size=40)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, seed=st.integers(0, 2**32 - 1))
def test_mapping_to_the_same_tokenizer_changes_nothing_but_in_split_characters(
    name: str, text: str, seed: int
) -> None:
    reading = read_with_offsets(TOKENIZERS[name], text)
    spans = reading.spans
    chosen = np.random.default_rng(seed).random(len(spans)) < 0.4
    mapped = mapped_key_tokens(chosen, spans, spans)
    assert not (chosen & ~mapped).any()
    # Of a character in several tokens, all are key tokens where one is.
    split = np.array([(spans[:, 0] < end) & (spans[:, 1] > start) for start, end in spans]).reshape(
        len(spans), -1
    )
    assert all((split[n] & chosen).any() and split[n].sum() > 1 for n in np.flatnonzero(mapped & ~chosen))
    if text.isascii():
        assert mapped.tolist() == chosen.tolist()
        # Every character belongs to one token, also the white space that offsets leave out.
        assert (spans[1:, 0] == spans[:-1, 1]).all()


@given(text=TEXTS, seed=st.integers(0, 2**32 - 1))
def test_white_space_that_offsets_leave_out_hides_no_key_token(text: str, seed: int) -> None:
    whole, trimmed = (read_with_offsets(TOKENIZERS[f"bytes, trim {trim}"], text) for trim in (False, True))
    assert whole.input_ids.tolist() == trimmed.input_ids.tolist()
    chosen = np.random.default_rng(seed).random(len(whole.spans)) < 0.4
    expected = mapped_key_tokens(chosen, whole.spans, whole.spans)
    assert mapped_key_tokens(chosen, trimmed.spans, whole.spans).tolist() == expected.tolist()
    assert mapped_key_tokens(chosen, whole.spans, trimmed.spans).tolist() == expected.tolist()


def test_texts_are_cut_to_the_models_room_and_at_whole_characters() -> None:
    tokenizer = TOKENIZERS["bytes, trim False"]
    ids = np.array(tokenizer("ab 漢 ab")["input_ids"])
    for room in range(1, len(ids) + 1):
        ((own, other),) = readings([ids], tokenizer, TOKENIZERS["demo"], room)
        whole = tokenizer.decode(ids[:room].tolist()).rstrip("\ufffd")
        assert tokenizer.decode(own.input_ids.tolist()) == TOKENIZERS["demo"].decode(other.input_ids) == whole
        assert len(own.input_ids) <= room


def test_offsets_get_the_white_space_that_they_leave_out() -> None:
    trimmed = TOKENIZERS["bytes, trim True"]
    # Ġ, Ġa, b, \n, Ġ: with trimmed offsets the first and the last have no characters.
    assert trimmed("  ab\n ", return_offsets_mapping=True)["offset_mapping"][0] == (0, 0)
    assert read_with_offsets(trimmed, "  ab\n ").spans.tolist() == [[0, 1], [1, 4], [4, 5], [5, 6]]


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Silent:
        name_or_path = "silent"

        def __call__(self, text: str, **settings: Any) -> dict[str, Any]:
            return {"input_ids": [1, 2], "offset_mapping": [(0, 0), (3, 3)]}

    with pytest.raises(RopewalkError, match="'silent' gives no character offsets"):
        read_with_offsets(Silent(), "text")


@given(st.integers(2, 120), st.integers(1, 40), st.integers(1, 20))
def test_short_rows_cover_what_lies_beyond_the_first(n_tokens: int, short: int, step: int) -> None:
    windows = list(short_windows(n_tokens, short, step))
    assert [t for w in windows for t in range(w.first, w.end)] == list(range(short + step, n_tokens))
    for window in windows:
        assert window.first - window.start == short
        assert 0 < window.end - window.first <= step
        assert window.start > 0


def test_task_has_what_a_comparison_needs() -> None:
    model = Recalling(sure=8.0)
    found = long_perplexity(
        WindowReader(model, identity(), BOS),
        [needle(30), needle(9), needle(40), needle(5)],
        KeyTokenRule(40, 8, 4),
    )
    task = longppl_task(found)
    assert (task.suite, task.task, task.length, task.unit, task.status) == (
        "longppl",
        "longppl",
        40,
        "perplexity",
        "ok",
    )
    assert task.score == found.perplexity
    assert task.n == 1
    assert task.samples == ({"index": 0, "nats": pytest.approx(loss_of(8.0)), "tokens": 1},)
    expected = {
        "evaluator": ITSELF,
        "evaluator_tokens": 40,
        "mapping": "tokens",
        "short_context": 8,
        "step": 4,
        "alpha": 2.0,
        "beta": -2.0,
        "n_key_tokens": 1,
        "n_compared": 22 + 1 + 27,
        "n_tokens": 34 + 13 + 39,
        "documents": 3,
        "documents_short": 1,
        "documents_shorter_than_length": 2,
    }
    assert {key: task.details[key] for key in expected} == expected
    assert task.details["perplexity"] == found.overall
    again = TaskResult.from_json(json.loads(json.dumps(task.to_json(), allow_nan=False)))
    assert again.to_json() == task.to_json()


def test_interval_is_over_documents(own: tuple[Any, OutputHead]) -> None:
    found = long_perplexity(
        WindowReader(*own, BOS), text(40, 37, 33, 40, 39), KeyTokenRule(36, 4, 2, 0.2, -6.0)
    )
    counts = [d.tokens for d in found.documents]
    assert len([count for count in counts if count]) > 2
    expected = ratio_interval([d.nats for d in found.documents], counts, at_least=0)
    assert found.ci95 == tuple(map(math.exp, expected))
    assert found.ci95[0] < found.perplexity < found.ci95[1]


def test_no_key_token_is_not_run_and_says_why() -> None:
    task = longppl_task(
        long_perplexity(
            WindowReader(Recalling(sure=8.0), identity(), BOS), [needle(9)], KeyTokenRule(64, 8, 4)
        )
    )
    assert task.status == "not run"
    assert task.unit == "perplexity"
    assert math.isnan(task.score)
    assert task.reason == (
        "none of 1 tokens is a key token: the long context never reduced the loss of the model itself by more than 2 "
        "nats to a log-probability above -2"
    )
    assert task.details["perplexity"] > 1
    json.dumps(task.to_json(), allow_nan=False)


class Breaking(Recalling):
    """Loses its numbers in long or in short rows that hold a certain token."""

    def __init__(self, sure: float, in_long: bool) -> None:
        super().__init__(sure)
        self.in_long = in_long

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        out = super().forward(input_ids, use_cache)
        if self.in_long == (input_ids.shape[1] > 20):
            out.last_hidden_state[(input_ids == 95).any(dim=1)] = math.nan
        return out


@pytest.mark.parametrize("in_long", [False, True])
def test_loss_that_is_not_finite_is_not_run(in_long: bool) -> None:
    documents = [needle(30), np.append(needle(31), 95)]
    found = long_perplexity(
        WindowReader(Breaking(8.0, in_long), identity(), BOS), documents, KeyTokenRule(64, 8, 4)
    )
    assert found.documents[0].tokens == 1
    assert math.isnan(found.perplexity)
    task = longppl_task(found)
    assert task.status == "not run"
    assert task.reason == "losses of document 1 are not finite, so no key tokens can be selected"
    assert (task.details["perplexity"] is None) == in_long
    json.dumps(task.to_json(), allow_nan=False)


def test_leaves_the_models_as_they_were(own: tuple[Any, OutputHead], other: tuple[Any, OutputHead]) -> None:
    tokenizer = word_tokenizer(BOS)
    own[0].train()
    try:
        long_perplexity(
            WindowReader(*own, BOS),
            text(37),
            KeyTokenRule(30, 4, 2),
            evaluator=Evaluator("other", *other, tokenizer),
            tokenizer=tokenizer,
        )
        assert own[0].training
        assert not other[0].training
    finally:
        own[0].eval()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"short_context": 40}, "short_context 40 and step 4 leave nothing.*length of 40"),
        ({"short_context": 35}, "short_context plus step must be less than 39"),
        ({"short_context": 0}, "short_context must be 1 or more, got 0"),
        ({"step": 0}, "step must be 1 or more, got 0"),
        ({"alpha": math.nan}, "alpha must be a finite number of nats, got nan"),
        ({"beta": -math.inf}, "beta must be a finite number of nats, got -inf"),
        ({"prefill_chunk": 0}, "prefill_chunk must be 1 token or more, got 0"),
        ({"documents": text(12, 3)}, "of 8 tokens plus the step of 4; the longest of 2 documents has 12"),
        ({"documents": []}, "the longest of 0 documents has 0"),
    ],
)
def test_refuses_what_it_cannot_score(settings: dict[str, Any], message: str) -> None:
    model = Recalling(sure=8.0)
    values = {"documents": text(30), "length": 40, "short_context": 8, "step": 4, **settings}
    reading = {name: values.pop(name) for name in ("prefill_chunk",) if name in values}
    with pytest.raises(RopewalkError, match=message):
        long_perplexity(
            WindowReader(model, identity(), BOS, **reading), values.pop("documents"), KeyTokenRule(**values)
        )
    assert model.rows == []


def test_evaluator_whose_rope_would_change_between_chunks_is_refused(own: tuple[Any, OutputHead]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    stock = tiny_llama(rope_parameters=rope)
    tokenizer = word_tokenizer(BOS)
    evaluator = Evaluator("stock", stock, OutputHead.of(stock), tokenizer)
    with pytest.raises(EngineError, match="RoPE of type dynamic"):
        long_perplexity(
            WindowReader(*own, BOS, prefill_chunk=8),
            text(37),
            KeyTokenRule(30, 4, 2),
            evaluator=evaluator,
            tokenizer=tokenizer,
        )
