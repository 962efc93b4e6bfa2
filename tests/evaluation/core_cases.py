"""Tokenizers, samples, results and a backend that tests of the evaluation's core make themselves."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ropewalk.errors import RunFailure
from ropewalk.evaluation.backends import Answer, GenerationRequest
from ropewalk.evaluation.predictions import Prediction, predicted
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.evaluation.samples import Sample
from ropewalk.io.digests import digest

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WILD_TEXTS = (
    "\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link",
    "<script>alert('1')</script> & \"quoted\" \\n </td>",
    "lone \ud800 and \udfff surrogates",
    "NUL \x00, line ends \r \n \r\n \x0b \x0c \x85 \u2028 \u2029 and tabs \t",
    "日本語 🧵 é é",
    "",
)


def byte_tokenizer(
    bos: str | None = "<s>", template: bool = False, chat: str | None = None, merges: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """One token a byte.

    Args:
        bos: the BOS token; its letters are one token also where it is no BOS.
        template: plain calls add a BOS, as with Llama's tokenizers.
        chat: the chat template.
        merges: bytes that are one token beside each other, which makes tokens of units not add up.
    """
    vocabulary = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    for pair in merges:
        vocabulary[pair] = len(vocabulary)
    half = [(pair[: len(pair) // 2], pair[len(pair) // 2 :]) for pair in merges]
    backend = Tokenizer(BPE(vocabulary, half))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    if template and bos:
        special = [(bos, backend.token_to_id(bos))]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token="</s>", chat_template=chat
    )


def letter_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """One token a letter of those given, and ``<unk>`` for any other."""
    vocabulary = {"<unk>": 0, **{letter: number + 1 for number, letter in enumerate(letters)}}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def asked_sample(encoder: PromptEncoder, index: int = 0, text: str | None = None, **extra: Any) -> Sample:
    """A sample whose answer is its own index."""
    text = f"What is the number of sample {index}?" if text is None else text
    prompt = encoder.encode(text, " It is")
    fields: dict[str, Any] = {
        "suite": "ruler",
        "task": "niah",
        "length": 64,
        "index": index,
        "text": text,
        "answer_prefix": " It is",
        "references": (str(index),),
        "metric": "first integer",
        "max_new_tokens": 8,
        "prompt_tokens": len(prompt.input_ids),
        "bos_count": prompt.bos_count,
        "details": {"depth": 0.5},
    }
    return Sample(**{**fields, **extra})


def answered(sample: Sample, text: str) -> Prediction:
    """A prediction of so much text."""
    return predicted(sample, Answer(0, text, len(text), True))


class NumberBackend:
    """Answers each prompt with the number that stands in it.

    Args:
        tokenizer: of the prompts.
        order: in which requests are answered; all that are left out are forgotten.
        fails_after: answers after which the run cannot go on.
    """

    description = {"kind": "number"}  # noqa: RUF012 - the protocol asks for a plain dict

    def __init__(
        self,
        tokenizer: Any,
        order: Callable[[int], Sequence[int]] = range,
        fails_after: int | None = None,
    ) -> None:
        self.tokenizer, self.order, self.fails_after = tokenizer, order, fails_after
        self.asked: list[list[GenerationRequest]] = []

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        self.asked.append(list(requests))
        for number, index in enumerate(self.order(len(requests))):
            if number == self.fails_after:
                raise RunFailure("the memory of the device is full")
            text = self.tokenizer.decode(list(requests[index].input_ids), skip_special_tokens=True)
            said = "".join(c for c in text if c.isdigit())
            yield Answer(index, f" {said}.", 2, True)


def percent_result(
    scores: Sequence[float], task: str = "niah", length: int | None = 4096, suite: str = "ruler", **extra: Any
) -> TaskResult:
    """A result with these scores in percent; equal numbers of samples stand for equal samples."""
    mean = sum(scores) / len(scores)
    fields: dict[str, Any] = {
        "details": {SAMPLES: digest([task, length, len(scores)])},
        "samples": tuple({"index": i, "score": float(score)} for i, score in enumerate(scores)),
    }
    return TaskResult(suite, task, length, len(scores), mean, (mean - 1, mean + 1), **{**fields, **extra})


def perplexity_result(nats: Sequence[Any], tokens: Sequence[int], score: float, **extra: Any) -> TaskResult:
    """A perplexity with these rows."""
    rows = enumerate(zip(nats, tokens, strict=True))
    fields: dict[str, Any] = {
        "ci95": (score * 0.9, score * 1.1),
        "details": {SAMPLES: digest(list(tokens))},
        "samples": tuple({"index": i, "nats": total, "tokens": n} for i, (total, n) in rows),
    }
    return TaskResult(
        "perplexity",
        "perplexity",
        64,
        len(tokens),
        score,
        unit="perplexity",
        **{**fields, **extra},
    )


def through_json(value: Any) -> Any:
    """What a strict reader of JSON gets."""
    return json.loads(json.dumps(value, allow_nan=False))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file's lines."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
