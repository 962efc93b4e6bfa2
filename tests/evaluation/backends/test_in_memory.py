"""A model in memory: answers are those of the argmax, alone or in a batch, in chunks or not."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import GenerationRequest, InMemoryBackend, argmax_matches
from ropewalk.evaluation.backends import in_memory as decoding
from ropewalk.models.attention.kv_cache import cache_in
from ropewalk.models.load import attach
from ropewalk.rope import RotaryEmbedding
from tests.marks import slow_after


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with BOS and EOS."""
    vocabulary = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER)
NO_ENDING: frozenset[int] = frozenset()
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}
# Windows are shorter than the prompts, and chunks are shorter and longer than the windows.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "phi": ("PhiConfig", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 128},
    ),
}


def tiny(family: str = "llama", attached: bool = True, dtype: torch.dtype | None = None) -> Any:
    """A random model whose weights are large enough that no two tokens are near ties."""
    if dtype is None:
        # transformers' eager softmax is float32, in which float64's lowest number is minus infinity: a row of
        # padding, which sees nothing, would become NaN.
        dtype = torch.float32 if family == "gemma2" else torch.float64
    name, settings = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, name)(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            "bos_token_id": 256,
            "eos_token_id": 257,
            **settings,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if attached:
        attach(model)
    return model.to(dtype).eval()


def argmax_chain(model: Any, prompt: tuple[int, ...], new_tokens: int, length: int) -> list[int]:
    """The definition: the whole row again for each token, without cache, padding or chunks."""
    ids = list(prompt)
    for _ in range(new_tokens):
        with torch.no_grad(), decoding.generating(model, length):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def ragged_requests(
    count: int = 7, length: int = 100, new_tokens: int = 6, seed: int = 0
) -> list[GenerationRequest]:
    """Prompts of lengths from 1 to all that fits."""
    rng = random.Random(seed)
    longest = length - new_tokens
    sizes = [longest, 1, 2, longest - 1, *(rng.randint(20, longest) for _ in range(count - 4))]
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(size)) for size in sizes]
    return [GenerationRequest(prompt, new_tokens, length) for prompt in prompts]


def texts(backend: InMemoryBackend, requests: list[GenerationRequest]) -> list[str]:
    found = {answer.index: answer.text for answer in backend.answers(requests)}
    return [found[index] for index in range(len(requests))]


@cache
def expected_chains(family: str) -> list[list[int]]:
    model = tiny(family)
    return [argmax_chain(model, request.input_ids, 6, 100) for request in ragged_requests()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [7, 40, 10_000])
def test_a_batch_in_chunks_says_what_the_argmax_says_of_each_prompt_alone(family: str, chunk: int) -> None:
    model = tiny(family)
    requests = ragged_requests()
    rows = [request.input_ids for request in requests]
    found = decoding.greedy_ids(model, rows, 6, 100, NO_ENDING, chunk)
    expected = expected_chains(family)
    assert found == expected
    # A model that says the same of everything would prove nothing.
    assert len({token for row in expected for token in row}) > 8


def questions(texts: int = 2, each: int = 3, shared: int = 60, length: int = 100) -> list[GenerationRequest]:
    """Prompts of several lengths that begin alike, ``each`` at a time."""
    rng = random.Random(7)

    def drawn(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(size))

    begins = [drawn(shared) for _ in range(texts)]
    return [
        GenerationRequest(begins[n % texts] + drawn(rng.randint(1, 30)), 6, length)
        for n in range(texts * each)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [7, 10_000])
def test_what_prompts_begin_with_is_read_once_and_changes_no_answer(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "LEAST_SHARED", 20)
    model = tiny(family)
    requests = questions()
    read: list[int] = []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        read.append(kwargs["input_ids"].numel())

    model.register_forward_pre_hook(see, with_kwargs=True)
    rows = [each.input_ids for each in requests[::2]]
    together = decoding.greedy_ids(model, rows, 6, 100, NO_ENDING, chunk)
    # Layers with a window keep no keys that padding in the middle could stand between.
    times = 1 if family in ("llama", "qwen2", "phi", "phi3-longrope") else len(rows)
    own = max(map(len, rows)) - 60
    assert sum(read) == times * 60 + len(rows) * own + 5 * len(rows)
    assert together == [argmax_chain(model, row, 6, 100) for row in rows]


def test_questions_about_a_text_have_batches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LEAST_SHARED", 20)
    model = tiny()
    requests = [*questions(), *ragged_requests(4)]
    groups = [sorted(group) for group in decoding.grouped(requests)]
    assert sorted(groups) == [[0, 2, 4], [1, 3, 5], [6, 7, 8, 9]]
    alone = [texts(InMemoryBackend(model, TOKENIZER, batch_size=1), [each])[0] for each in requests]
    for batch_size in (2, 8):
        assert texts(InMemoryBackend(model, TOKENIZER, batch_size=batch_size), requests) == alone


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_equals_plain_generation_of_a_model_that_was_never_touched(family: str) -> None:
    stock, ours = tiny(family, attached=False), tiny(family)
    for request in ragged_requests():
        ids = torch.tensor([request.input_ids])
        stock.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        expected = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
        found = decoding.greedy_ids(ours, [request.input_ids], 6, 100, NO_ENDING)
        assert found[0] == expected[0, len(request.input_ids) :].tolist()


def test_half_precision_models_run_padded_and_in_chunks() -> None:
    model = tiny(dtype=torch.bfloat16)
    found = decoding.greedy_ids(
        model, [request.input_ids for request in ragged_requests()], 6, 100, NO_ENDING, 7
    )
    assert [len(row) for row in found] == [6] * 7


def test_answers_do_not_depend_on_order_batch_size_or_company() -> None:
    model = tiny("phi3-longrope")
    requests = [*ragged_requests(length=100), *ragged_requests(length=60, seed=1)]
    alone = [texts(InMemoryBackend(model, TOKENIZER, batch_size=1), [each])[0] for each in requests]
    order = random.Random(5).sample(range(len(requests)), len(requests))
    for batch_size in (2, 3, 50):
        backend = InMemoryBackend(model, TOKENIZER, batch_size=batch_size, prefill_chunk=64)
        assert texts(backend, requests) == alone
        assert texts(backend, [requests[index] for index in order]) == [alone[index] for index in order]


def test_rope_that_depends_on_the_length_is_fixed_by_the_length_of_the_request() -> None:
    model = tiny("phi3-longrope")
    (prompt,) = {request.input_ids for request in ragged_requests() if len(request.input_ids) == 2}
    row = prompt * 20
    found = {
        length: decoding.greedy_ids(model, [row], 6, length, NO_ENDING)[0] for length in (46, 64, 65, 128)
    }
    assert found[46] == found[64] == argmax_chain(model, row, 6, 64)
    assert found[65] == found[128] == argmax_chain(model, row, 6, 65)
    assert found[64] != found[65]
    seen = []
    rotary = next(module for module in model.modules() if isinstance(module, RotaryEmbedding))
    rotary.register_forward_hook(lambda *_: seen.append(rotary.total_length))
    texts(InMemoryBackend(model, TOKENIZER), [GenerationRequest(row, 6, 46), GenerationRequest(row, 6, 128)])
    assert set(seen[: len(seen) // 2]) == {128}
    assert set(seen[len(seen) // 2 :]) == {46}
    assert rotary.total_length is None


def test_transformers_own_rotary_module_is_refused_where_the_rope_depends_on_the_length() -> None:
    model = tiny("phi3-longrope", attached=False)
    with pytest.raises(
        RopewalkError, match=r"Phi3ForCausalLM uses .* longrope.*load the model with exact_rope=True"
    ):
        InMemoryBackend(model, TOKENIZER)
    InMemoryBackend(tiny("llama", attached=False), TOKENIZER)


def test_nothing_of_the_checkpoints_generation_config_applies_but_its_endings() -> None:
    plain, hostile = tiny(), tiny()
    requests = ragged_requests()
    expected = texts(InMemoryBackend(plain, TOKENIZER), requests)
    hostile.generation_config = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        suppress_tokens=list(range(100)),
        min_new_tokens=20,
        max_length=7,
        num_beams=3,
    )
    assert texts(InMemoryBackend(hostile, TOKENIZER), requests) == expected


def test_any_of_several_endings_ends_an_answer_and_none_is_in_its_text() -> None:
    model = tiny()
    prompt = ragged_requests()[0].input_ids
    chain = argmax_chain(model, prompt, 12, 200)
    tokenizer = byte_tokenizer()
    said = chain[: chain.index(chain[5])]
    assert len(said) > 1
    # One that is no special token for the tokenizer, and would stay in the text.
    tokenizer.add_tokens([tokenizer.convert_ids_to_tokens(chain[5])])
    assert chain[5] in tokenizer.added_tokens_decoder
    model.generation_config.eos_token_id = [257, chain[5]]
    (answer,) = InMemoryBackend(model, tokenizer).answers([GenerationRequest(prompt, 12, 200)])
    assert answer.text == TOKENIZER.decode(said)
    assert (answer.new_tokens, answer.finished) == (len(said) + 1, True)


def test_the_tokenizers_eos_ends_an_answer_and_the_room_does_too() -> None:
    model = tiny()
    prompt = ragged_requests()[0].input_ids
    chain = argmax_chain(model, prompt, 12, 200)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(chain[5])
    (answer,) = InMemoryBackend(model, tokenizer).answers([GenerationRequest(prompt, 12, 200)])
    assert (answer.new_tokens, answer.finished) == (chain.index(chain[5]) + 1, True)
    (answer,) = InMemoryBackend(model, TOKENIZER).answers([GenerationRequest(prompt, 3, 200)])
    assert (answer.text, answer.new_tokens, answer.finished) == (TOKENIZER.decode(chain[:3]), 3, False)


def test_rows_that_end_early_leave_the_others_as_they_are() -> None:
    model = tiny()
    rows = [request.input_ids for request in ragged_requests()]
    chains = [argmax_chain(model, row, 8, 100) for row in rows]
    ending = chains[0][2]
    found = decoding.greedy_ids(model, rows, 8, 100, frozenset([ending]))
    expected = [row[: row.index(ending) + 1] if ending in row else row for row in chains]
    assert found == expected
    assert len({len(row) for row in found}) > 1


def test_generation_stops_when_all_rows_have_ended() -> None:
    model = tiny()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    row = ragged_requests()[0].input_ids
    ending = decoding.greedy_ids(model, [row], 1, 100, NO_ENDING)[0][0]
    calls.clear()
    assert decoding.greedy_ids(model, [row, row], 50, 200, frozenset([ending])) == [[ending], [ending]]
    assert len(calls) == 1


def test_an_ordinary_token_that_the_config_calls_eos_ends_nothing() -> None:
    model = tiny()
    model.generation_config.eos_token_id = 2
    assert InMemoryBackend(model, TOKENIZER).endings == {TOKENIZER.eos_token_id}
    without = byte_tokenizer()
    without.eos_token = None
    assert InMemoryBackend(model, without).endings == NO_ENDING


def test_lengths_never_share_a_batch_and_the_longest_come_first() -> None:
    model = tiny()
    requests = [
        *ragged_requests(length=60),
        *ragged_requests(length=100),
        *ragged_requests(length=60, seed=1),
    ]
    prefills: list[int] = []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        if cache_in(kwargs).get_seq_length() == 0:
            prefills.append(len(kwargs["input_ids"]))

    model.register_forward_pre_hook(see, with_kwargs=True)
    answers = list(InMemoryBackend(model, TOKENIZER, batch_size=4).answers(requests))
    assert sorted(answer.index for answer in answers) == list(range(len(requests)))
    lengths = [requests[answer.index].length for answer in answers]
    assert lengths == sorted(lengths, reverse=True)
    for length in (60, 100):
        sizes = [len(requests[a.index].input_ids) for a in answers if requests[a.index].length == length]
        assert sizes == sorted(sizes, reverse=True)
    assert prefills == [4, 3, 4, 4, 4, 2]


def test_answers_are_yielded_as_each_batch_is_done_and_gradients_stay_on_between() -> None:
    model = tiny().train()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(model.training))
    stream = InMemoryBackend(model, TOKENIZER, batch_size=2).answers(ragged_requests())
    assert not calls
    next(stream)
    assert model.training
    assert torch.is_grad_enabled()
    first = len(calls)
    next(stream)
    assert len(calls) == first
    next(stream)
    assert len(calls) > first
    assert not any(calls)


def test_logits_are_asked_for_at_one_position_a_row() -> None:
    model = tiny()
    shapes = []
    model.register_forward_hook(lambda _, args, output: shapes.append(tuple(output.logits.shape)))
    decoding.greedy_ids(model, [request.input_ids for request in ragged_requests()], 4, 100, NO_ENDING, 70)
    assert set(shapes) == {(7, 1, VOCABULARY)}
    shapes.clear()
    row = list(ragged_requests()[0].input_ids)
    argmax_matches(model, row, len(row) - 5, prefill_chunk=20)
    # Ninety-four tokens: the eighty-eight before the last prompt token, then the five that predict targets.
    assert shapes == [(1, 1, VOCABULARY)] * 5 + [(1, 5, VOCABULARY)]


@contextmanager
def failing_above(
    model: Any, most_tokens: int, most_rows: int, error: RuntimeError
) -> Iterator[list[tuple[int, int]]]:
    """The model runs out of memory on more rows, or more tokens at once; yields (rows, width) of what ran."""
    shapes: list[tuple[int, int]] = []

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        rows, width = kwargs["input_ids"].shape
        if rows > most_rows or rows * width > most_tokens:
            raise error
        shapes.append((rows, width))

    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    yield shapes
    handle.remove()


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:133] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "4611686018427387904 bytes. Error code 12 (Cannot allocate memory)"
    ),
]


@pytest.mark.parametrize(
    ("error", "most_rows"), [(OUT_OF_MEMORY[0], 1), (OUT_OF_MEMORY[1], 2), (OUT_OF_MEMORY[0], 3)]
)
def test_a_batch_that_does_not_fit_is_halved_and_every_request_is_answered_once(
    error: RuntimeError, most_rows: int
) -> None:
    model = tiny()
    requests = [*ragged_requests(length=100), *ragged_requests(length=60)]
    expected = texts(InMemoryBackend(model, TOKENIZER), requests)
    with failing_above(model, 10_000, most_rows, error) as shapes:
        answers = list(InMemoryBackend(model, TOKENIZER, batch_size=7).answers(requests))
    assert sorted(answer.index for answer in answers) == list(range(len(requests)))
    assert [a.text for a in sorted(answers, key=lambda a: a.index)] == expected
    # Seven, three, one: the first that fits.
    assert max(rows for rows, _ in shapes) == (3 if most_rows == 3 else 1)


def test_a_chunk_counts_the_tokens_of_all_rows() -> None:
    model = tiny()
    rows = [request.input_ids for request in ragged_requests()]
    with failing_above(model, 21, 8, OUT_OF_MEMORY[0]) as shapes:
        decoding.greedy_ids(model, rows, 2, 100, NO_ENDING, chunk=21)
    assert max(shapes) == (7, 3)


def test_one_prompt_that_does_not_fit_is_read_in_smaller_chunks() -> None:
    model = tiny()
    prompt = ragged_requests()[0].input_ids * 12
    request = GenerationRequest(prompt, 4, len(prompt) + 4)
    expected = texts(InMemoryBackend(model, TOKENIZER), [request])
    with failing_above(model, 300, 8, OUT_OF_MEMORY[0]) as shapes:
        assert texts(InMemoryBackend(model, TOKENIZER, batch_size=1), [request]) == expected
    # Neither 1128 tokens at once fit nor 564.
    assert max(shapes) == (1, 282)


def test_too_little_memory_for_the_smallest_chunk_ends_the_run_and_keeps_what_was_answered() -> None:
    model = tiny()
    long = ragged_requests()[0].input_ids * 12
    requests = [
        GenerationRequest(long, 4, 2000),
        *(GenerationRequest(r.input_ids, 6, 2100) for r in ragged_requests()),
    ]
    stream = InMemoryBackend(model, TOKENIZER).answers(requests)
    with failing_above(model, 255, 8, OUT_OF_MEMORY[0]):
        got = [next(stream) for _ in range(7)]
        assert {answer.index for answer in got} == set(range(1, 8))
        with pytest.raises(
            RunFailure,
            match=r"^out of memory on cpu with a single prompt of 1128 tokens in chunks of 256; use shorter",
        ):
            next(stream)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    model = tiny()
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with failing_above(model, 1, 1, error), pytest.raises(RuntimeError, match="mat1 and mat2"):
        texts(InMemoryBackend(model, TOKENIZER), ragged_requests())


def test_torch_says_on_the_cpu_what_is_recognised_as_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert decoding.is_out_of_memory(caught.value)


def test_nothing_of_a_cache_outlives_its_batch() -> None:
    model = tiny()
    caches = []
    model.register_forward_pre_hook(lambda _, args, kwargs: caches.append(cache_in(kwargs)), with_kwargs=True)
    decoding.greedy_ids(model, [ragged_requests()[0].input_ids], 3, 100, NO_ENDING)
    assert caches
    assert all(not cache.layers for cache in caches)


def test_logits_that_are_no_numbers_end_the_run() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(RunFailure, match="logits are NaN in float64"):
        texts(InMemoryBackend(model, TOKENIZER), ragged_requests())
    with pytest.raises(RunFailure, match="logits are NaN"):
        argmax_matches(model, [1, 2, 3], 1)


@cache
def said_alone(family: str) -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompts, and what the model says after each of them by itself."""
    model, prompts = tiny(family), [request.input_ids for request in ragged_requests(new_tokens=9)]
    return [(prompt, decoding.greedy_ids(model, [prompt], 9, 100, NO_ENDING)[0]) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", slow_after(1, [7, 10_000]))
def test_forced_targets_match_where_greedy_generation_says_them(family: str, chunk: int) -> None:
    model = tiny(family)
    # The first place, one in the middle and the last, each on prompts of several lengths.
    for (prompt, said), place in zip(said_alone(family), (0, 4, 8, 8, 0, 4, 4), strict=True):
        row = [*prompt, *said]
        assert argmax_matches(model, row, len(prompt), 100, chunk) == [True] * 9
        row[len(prompt) + place] = (row[len(prompt) + place] + 1) % VOCABULARY
        matches = argmax_matches(model, row, len(prompt), 100, chunk)
        assert matches[: place + 1] == [True] * place + [False]


def test_forced_targets_longer_than_a_chunk_are_those_of_one_plain_pass() -> None:
    model = tiny()
    rng = random.Random(1)
    row = [rng.randrange(VOCABULARY) for _ in range(700)]
    row[600:] = decoding.greedy_ids(model, [row[:600]], 100, 700, NO_ENDING)[0]
    with torch.no_grad():
        best = model(input_ids=torch.tensor([row])).logits[0].argmax(-1).tolist()
    expected = [best[place - 1] == row[place] for place in range(1, 700)]
    with failing_above(model, 256, 1, OUT_OF_MEMORY[0]) as shapes:
        # Every position has logits of the whole vocabulary here, so a chunk of 8192 is not taken at its word.
        assert decoding._matches(model, row, 1, 700, 8192) == expected
    assert max(shapes) == (1, 256)
    assert not all(expected)
    assert all(expected[-100:])


def test_forced_targets_are_read_in_smaller_chunks_where_memory_is_short() -> None:
    model = tiny()
    row = list(ragged_requests()[0].input_ids * 12)
    expected = argmax_matches(model, row, 1000)
    with failing_above(model, 300, 1, OUT_OF_MEMORY[0]):
        assert argmax_matches(model, row, 1000) == expected
    with failing_above(model, 100, 1, OUT_OF_MEMORY[1]), pytest.raises(RunFailure, match="of 1128 tokens"):
        argmax_matches(model, row, 1000)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest((), 4, 100), "a prompt has no tokens"),
        (GenerationRequest((1, 2), 0, 100), r"max_new_tokens of request 1 must be 1 or more, got 0"),
        (
            GenerationRequest((1,) * 97, 4, 100),
            "request 1 has 97 prompt tokens and max_new_tokens 4, together 101",
        ),
        (
            GenerationRequest((1, VOCABULARY), 4, 100),
            rf"token id {VOCABULARY}, but the model's vocabulary has ids 0 to {VOCABULARY - 1}",
        ),
        (GenerationRequest((1, -1), 4, 100), r"token id -1"),
    ],
)
def test_bad_requests_are_refused_before_the_model_is_asked(
    request_: GenerationRequest, message: str
) -> None:
    model = tiny()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(RopewalkError, match=message):
        InMemoryBackend(model, TOKENIZER).answers([GenerationRequest((1, 2), 4, 100), request_])
    assert not calls


def test_bad_settings_are_refused() -> None:
    model = tiny()
    with pytest.raises(RopewalkError, match="batch_size must be 1 or more, got 0"):
        InMemoryBackend(model, TOKENIZER, batch_size=0)
    with pytest.raises(RopewalkError, match="prefill_chunk must be 1 or more, got -1"):
        InMemoryBackend(model, TOKENIZER, prefill_chunk=-1)
    for start in (0, 3):
        with pytest.raises(RopewalkError, match=rf"from 1 to 2 in a row of 3 tokens, got {start}"):
            argmax_matches(model, [1, 2, 3], start)


def test_no_requests_no_answers() -> None:
    assert list(InMemoryBackend(tiny(), TOKENIZER).answers([])) == []


def test_the_description_says_what_answers() -> None:
    assert InMemoryBackend(tiny(), TOKENIZER).description == {
        "kind": "in memory",
        "model": "LlamaForCausalLM",
        "dtype": "float64",
        "device": "cpu",
    }
