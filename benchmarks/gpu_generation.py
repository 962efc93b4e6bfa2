"""The generation of ``python -m benchmarks.gpu``: RULER's prompts a second, beside ``generate`` of transformers.

Random weights with the embedded model's tokenizer: time does not depend on what they say. Both ways answer the same
prompts with the same number of tokens; ours in batches as ``ropewalk eval`` does, theirs one by one and in the same
batches, padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.gpu_sizes import Case, Sizes, allocated_gib, finish, peak_gib
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.evaluation.backends.in_memory import InMemoryBackend
from ropewalk.evaluation.backends.protocol import GenerationRequest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.ruler.tasks import RULER
from ropewalk.models.load import attach

TASK = "niah_multikey_2"
"""RULER's task whose prompts are filled with text that costs no download."""


def cases(sizes: Sizes, device: str) -> list[Case]:
    """The same prompts by each way and batch."""
    name = next(iter(sizes.models))
    named = {"model": name, "length": sizes.prompt, "answer": sizes.answer, "prompts": sizes.prompts}
    return [
        Case({**named, "way": way, "batch": batch}, partial(answered, way, batch, sizes, device))
        for batch in (sizes.prompts, 1)
        for way in ("ropewalk", "generate")
    ]


def answered(way: str, batch: int, sizes: Sizes, device: str) -> dict[str, Any]:
    """Prompts and new tokens a second."""
    tokenizer = load_tokenizer(resolve_model("embedded"))
    encoder = PromptEncoder(tokenizer)
    began = time.perf_counter()
    samples = list(RULER[TASK].samples(encoder, sizes.prompt - sizes.answer, sizes.prompts, 0))
    making = time.perf_counter() - began
    prompts = [encoder.encode(each.text, each.answer_prefix).input_ids for each in samples]
    model = random_model(sizes, len(tokenizer), device, ours=way == "ropewalk")
    backend = InMemoryBackend(model, tokenizer, batch)

    def answer(some: Sequence[tuple[int, ...]]) -> None:
        if way == "ropewalk":
            requests = [GenerationRequest(ids, sizes.answer, sizes.prompt) for ids in some]
            list(backend.answers(requests))
        else:
            for start in range(0, len(some), batch):
                generate(model, some[start : start + batch], sizes.answer, device)

    # A short prompt first: kernels are loaded and memory is taken.
    answer([ids[:256] for ids in prompts[:batch]])
    finish(torch.device(device))
    before = allocated_gib(device)
    began = time.perf_counter()
    answer(prompts)
    finish(torch.device(device))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "prompts_per_s": len(prompts) / seconds,
        "prompt_tokens_per_s": sum(map(len, prompts)) / seconds,
        "seconds_to_make_prompts": making,
        "before_gib": before,
        **peak_gib(device),
    }


def random_model(sizes: Sizes, vocabulary: int, device: str, ours: bool) -> Any:
    shape = next(iter(sizes.models.values()))
    config = transformers.LlamaConfig(
        **{**shape, "vocab_size": max(vocabulary, shape["vocab_size"])}, max_position_embeddings=sizes.prompt
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if ours:
        attach(model)
    return model.eval()


@torch.no_grad()
def generate(model: Any, rows: Sequence[tuple[int, ...]], new_tokens: int, device: str) -> None:
    """A batch by transformers."""
    longest = max(map(len, rows))
    ids = torch.tensor([(0,) * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
