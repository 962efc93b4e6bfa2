"""The server's own tokenizer gives its ids, and a count of words is scaled as the server counts."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import GenerationRequest
from ropewalk.evaluation.backends.responses import FaultError
from ropewalk.evaluation.backends.text_counters import SHORT, ServerTokenizer, WordCounter
from ropewalk.evaluation.prompt import PromptEncoder
from tests.completion_server import CompletionServer, completion, message, refusal
from tests.evaluation.backends.server_cases import backend
from tests.evaluation.core_cases import byte_tokenizer

TEXTS = ["a b", "", "The pass key is 70214. <s> Zürich 🧵", "a" * 300]


def posts_of(form: str, tokenizer: Any) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """``/tokenize`` and ``/detokenize`` as a kind of server has them, with a tokenizer behind."""

    def ids(text: str, special: bool) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
        return found

    def of_vllm(value: dict[str, Any]) -> Any:
        if value["model"] != "tiny":
            return refusal(404, "no such model")
        found = ids(value["prompt"], value["add_special_tokens"])
        return {"count": len(found), "max_model_len": 512, "tokens": found}

    def of_llama(value: dict[str, Any]) -> Any:
        # It ignores fields that it does not know.
        return {
            "tokens": ids(value["content"], value.get("add_special", False)) if "content" in value else []
        }

    def text(value: dict[str, Any]) -> str:
        return str(
            tokenizer.decode(value["tokens"], skip_special_tokens=value.get("skip_special_tokens", False))
        )

    return {
        "vllm": {"/tokenize": of_vllm, "/detokenize": lambda value: {"prompt": text(value)}},
        "sglang": {
            "/tokenize": of_vllm,
            # Special tokens are left out unless a request says otherwise.
            "/detokenize": lambda value: {"text": text({"skip_special_tokens": True, **value})},
        },
        "llama.cpp": {"/tokenize": of_llama, "/detokenize": lambda value: {"content": text(value)}},
    }[form]


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("form", ["vllm", "sglang", "llama.cpp"])
def test_the_server_s_tokenizer_gives_the_ids_of_the_one_behind_it(form: str, template: bool) -> None:
    behind = byte_tokenizer(template=template)
    with CompletionServer(lambda value, n: completion("x"), posts=posts_of(form, behind)) as server:
        asked = backend(server)
        asked.find()
        own = asked.own_tokenizer()
        for text in TEXTS:
            assert own(text, add_special_tokens=False) == {
                "input_ids": behind(text, add_special_tokens=False).input_ids
            }
        assert own(TEXTS, add_special_tokens=True)["input_ids"] == behind(TEXTS).input_ids
        # Only a token that the server adds is known to be BOS.
        assert (own.bos_token_id, own.bos_token) == (
            (behind.bos_token_id, "<s>") if template else (None, None)
        )
        ids = behind("<s> a b", add_special_tokens=False).input_ids
        assert own.decode(ids) == behind.decode(ids)
        encoder, local = PromptEncoder(own), PromptEncoder(behind if template else byte_tokenizer(bos=None))
        for text in TEXTS:
            assert encoder.encode(text, " d") == local.encode(text, " d")
            assert encoder.count(text, " d") == len(encoder.encode(text, " d").input_ids)
        encoder.check_alphabet()
        assert own.record["probe"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"tokens": ["a"]}, "/tokenize returns no token ids"),
        ({"tokens": [True]}, "/tokenize returns no token ids"),
        ({"tokens": [-1]}, "/tokenize returns no token ids"),
        ({"tokens": []}, "it returns no tokens of a text"),
        ([1], "/tokenize returns no token ids"),
        ({"count": 3}, "/tokenize returns no token ids"),
        (refusal(404, "Not Found"), "HTTP 404: Not Found"),
        (refusal(500, "Broken"), "HTTP 500: Broken"),
    ],
)
def test_a_server_that_counts_no_tokens_is_told(said: Any, reason: str) -> None:
    posts = {"/tokenize": lambda value: said, "/detokenize": lambda value: {"prompt": "a"}}
    with CompletionServer(lambda value, n: completion("x"), posts=posts) as server:
        asked = backend(server, retries=0)
        asked.find()
        with pytest.raises(RopewalkError, match=re.escape(f"does not count tokens with /tokenize ({reason}")):
            asked.own_tokenizer()


def test_texts_are_counted_several_at_a_time_in_their_order_and_a_fault_is_told() -> None:
    lock, under_way, most = threading.Lock(), 0, 0
    together, lost = threading.Event(), False

    def ask(path: str, value: dict[str, Any]) -> Any:
        nonlocal under_way, most
        if path == "/detokenize":
            return {"prompt": "a"}
        if lost:
            raise FaultError("connection lost")
        with lock:
            under_way += 1
            most = max(most, under_way)
        if value["prompt"].isdigit():
            if most == 3:
                together.set()
            together.wait(5)
        with lock:
            under_way -= 1
        return {"tokens": [len(value["prompt"])]}

    own = ServerTokenizer(ask, "m", 3)
    assert own.encode_batch_fast(["1" * n for n in range(1, 8)]) == [[n] for n in range(1, 8)]
    assert most == 3
    lost = True
    with pytest.raises(RunFailure, match=r"stopped counting tokens with /tokenize \(connection lost\)"):
        own("a")


def test_short_texts_are_counted_once_and_it_is_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropewalk.evaluation.backends.text_counters.SECONDS_BETWEEN_LINES", 0.0)
    asked: list[tuple[str, bool]] = []
    said: list[str] = []

    def ask(path: str, value: dict[str, Any]) -> Any:
        if path == "/detokenize":
            return {"prompt": "a"}
        asked.append((value["prompt"], value["add_special_tokens"]))
        return {"tokens": [len(value["prompt"]), int(value["add_special_tokens"])]}

    own = ServerTokenizer(ask, "m", 3, said.append)
    asked.clear()
    texts = ["word", "other", "word", "", "x" * SHORT, "y" * (SHORT + 1)]
    wanted = [[len(text), 0] for text in texts]
    for _ in range(2):
        found = own.encode_batch_fast(texts)
        assert found == wanted
        # What a caller does to the ids changes no later count.
        found[0].append(7)
    # With special tokens, a text has others.
    assert own("word")["input_ids"] == [4, 1]
    different = {(text, False) for text in texts}
    assert sorted(asked) == sorted([*different, ("y" * (SHORT + 1), False), ("word", True)])
    assert said[-1].startswith("preparing prompts: the server's /tokenize has counted 9 texts so far")


def counted_by(per_piece: float, around: int) -> Callable[[str], int]:
    """A server's count: of each word, up to three digits, or mark so many tokens, and some around them."""
    return lambda text: around + round(per_piece * len(re.findall(r"[^\W\d_]+|\d{1,3}|[^\w\s]|_", text)))


@pytest.mark.parametrize("per_piece", [0.5, 1.0, 1.25, 3.0])
@pytest.mark.parametrize("around", [0, 1, 12])
def test_words_are_scaled_as_the_server_counts(per_piece: float, around: int) -> None:
    counter = WordCounter()
    counter.measure(counted_by(per_piece, around))
    assert counter.record["tokens_per_piece"] == pytest.approx(per_piece, rel=0.01)
    assert abs(counter.around - around) <= 1
    encoder = PromptEncoder(counter)
    text = "The pass key is 70214, or " + "uuid 2f1c9a7e-85d4 " * 50
    count = encoder.count(text)
    assert (
        count
        == len(encoder.encode(text).input_ids)
        == pytest.approx(counted_by(per_piece, around)(text), rel=0.02, abs=2)
    )
    assert encoder.encode(text).input_ids != encoder.encode(text.replace("70214", "70215")).input_ids
    # A text that shows whether so many tokens are read.
    for length in (500, 5000, 100_000):
        shown, least = counter.probe(length)
        read = counted_by(per_piece, around)(shown)
        assert least <= read <= length
        if length > 1000:
            assert least > 0.7 * length


@pytest.mark.parametrize(
    "reads", [lambda text: None, lambda text: 0, lambda text: 100, lambda text: len(text) * 50]
)
def test_counts_that_cannot_be_are_refused(reads: Callable[[str], int | None]) -> None:
    with pytest.raises(RopewalkError, match=r"does not report the tokens of prompts|from such counts"):
        WordCounter().measure(reads)


def reads_of(limit: float, tokens_of: Callable[[str], int]) -> Callable[[dict[str, Any]], Any]:
    """The answer of one token of a server that reads at most so many tokens."""

    def said(value: dict[str, Any]) -> Any:
        if value.get("max_tokens") != 1:
            return None
        made = message if "messages" in value else completion
        texts = [value["prompt"]] if "prompt" in value else [each["content"] for each in value["messages"]]
        return made("x", "length", 1, read=min(sum(map(tokens_of, texts)), limit))

    return said


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_that_cuts_a_text_is_found_out_although_tokens_are_estimated(endpoint: str) -> None:
    tokens_of = counted_by(1.2, 7)
    with CompletionServer(lambda value, n: completion("x"), refuses=reads_of(4096, tokens_of)) as server:
        asked = backend(server, tokenizer=WordCounter(), endpoint=endpoint)
        asked.check()
        asked.require_length(4000)
        asked.require_length(4000)
        assert len(server.trials) == 4
        with pytest.raises(RopewalkError, match=r"read only 4,096 of at least 7,\d{3} tokens of a text"):
            asked.require_length(8000)
    # A longer text is not cut by a server that reads it all.
    with CompletionServer(lambda value, n: completion("x"), refuses=reads_of(1e9, tokens_of)) as server:
        asked = backend(server, tokenizer=WordCounter(), endpoint=endpoint)
        asked.check()
        asked.require_length(100_000)


def test_the_template_of_a_server_is_measured_and_counted() -> None:
    behind = byte_tokenizer(template=True)

    def length_of(text: str) -> int:
        return len(behind(text, add_special_tokens=False).input_ids) + 9

    posts = posts_of("vllm", behind)
    with CompletionServer(lambda v, n: message("x"), posts=posts, refuses=reads_of(1e9, length_of)) as server:
        asked = backend(server, endpoint="chat")
        asked.find()
        own = asked.own_tokenizer()
        asked.use(own)
        asked.check()
        assert own.around == 9
        encoder = PromptEncoder(own, chat=True, as_turns=True)
        assert encoder.count("a b", " c") == length_of("a b c") == len(encoder.encode("a b", " c").input_ids)
        # A system prompt is a turn of its own, around which a template may write as much.
        assert PromptEncoder(own, True, "be kind", as_turns=True).count("a b") == len("be kind\na b") + 18
        with pytest.raises(RopewalkError, match="has no chat template; add --endpoint chat"):
            PromptEncoder(own, chat=True)
    with CompletionServer(lambda v, n: message("x"), posts=posts) as server:
        asked = backend(server, endpoint="chat")
        asked.find()
        asked.use(asked.own_tokenizer())
        with pytest.raises(
            RopewalkError, match="does not report the tokens of prompts, so those of its chat template"
        ):
            asked.check()


def test_texts_are_sent_as_they_were_counted() -> None:
    """With BOS written out only where the server adds none itself."""
    behind = byte_tokenizer(template=True)

    def no_ids(value: dict[str, Any]) -> Any:
        return None if isinstance(value["prompt"], str) else refusal(422, "prompt must be a string")

    with CompletionServer(
        lambda value, n: completion("y"), posts=posts_of("vllm", behind), refuses=no_ids
    ) as server:
        asked = backend(server)
        asked.find()
        own = asked.own_tokenizer()
        asked.use(own)
        encoder = PromptEncoder(own)
        prompt = encoder.encode("a <s> b")
        request = GenerationRequest(prompt.input_ids, 4, 100, text=prompt.text)
        assert [answer.text for answer in asked.answers([request])] == ["y"]
        assert [value["prompt"] for value in server.requests] == ["a <s> b"]


def test_a_counter_of_one_kind_of_text_follows_the_server_s_count() -> None:
    counter = WordCounter()
    counter.measure(counted_by(1.0, 10))
    # Of the hundred tokens of a text ten stand around it; the server counts half as many again in it.
    lists = counter.scaled(100, 145)
    assert lists.tokens_per_piece == pytest.approx(1.5 * counter.tokens_per_piece)
    assert lists.around == counter.around == 10
    assert counter.scaled(100, None).tokens_per_piece == counter.tokens_per_piece
    assert counter.scaled(100, 10**9).tokens_per_piece == 4 * counter.tokens_per_piece
