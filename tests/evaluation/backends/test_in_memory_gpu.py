"""The model in memory on a CUDA device: batches, chunks, and the memory that a long prompt takes.

The first test runs on the CPU too, which shows that the test works."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from ropewalk.evaluation.backends import GenerationRequest, InMemoryBackend
from ropewalk.models.load import attach
from tests.evaluation.evaluation_cases import byte_tokenizer, tiny_llama

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def attached(vocab_size: int, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Attached before it is converted, which would round the frequencies of transformers' rotary module."""
    model = tiny_llama(vocab_size=vocab_size)
    attach(model)
    return model.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_batches_and_chunks_answer_like_single_prompts(device: str, dtype: torch.dtype) -> None:
    tokenizer = byte_tokenizer()
    model = attached(len(tokenizer), device, dtype)
    generator = torch.Generator().manual_seed(0)
    requests = [
        GenerationRequest(tuple(torch.randint(3, 250, (n,), generator=generator).tolist()), 8, 256)
        for n in (40, 97, 200)
    ]
    one_by_one = {a.index: a.text for a in InMemoryBackend(model, tokenizer, batch_size=1).answers(requests)}
    together = {
        a.index: a.text for a in InMemoryBackend(model, tokenizer, 3, prefill_chunk=96).answers(requests)
    }
    assert set(together) == set(one_by_one)
    # Rounding may tip a near tie in bfloat16, where sums are taken in another order.
    same = sum(together[index] == text for index, text in one_by_one.items())
    assert same == 3 if dtype == torch.float32 else same >= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_long_prompt_holds_no_logits_but_the_last() -> None:
    tokenizer = byte_tokenizer()
    model = attached(32_000, "cuda", torch.bfloat16)
    backend = InMemoryBackend(model, tokenizer, 1, prefill_chunk=2048)
    request = GenerationRequest(tuple([5] * 65_536), 1, 65_537)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert len(list(backend.answers([request]))) == 1
    # All logits in bfloat16 would be 4 GiB.
    assert torch.cuda.max_memory_allocated() - before < 2**30
