"""The audit on CUDA: the same figures as on the CPU, and memory that a 24 GiB GPU has."""

import pytest
import torch
import transformers

from ropewalk.audit import (
    AuditedModel,
    AuditSettings,
    Runner,
    Series,
    audit_model,
    stock_arithmetic,
)
from ropewalk.audit.passes import logit_difference, shifted
from tests.audit.audit_cases import drift_of_model, sharp_llama, token_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_drift_on_cuda_is_that_of_the_cpu():
    rows = token_rows(3, 128)
    series = [Series("bfloat16"), Series("float32"), Series("float32", "exact"), Series("float64")]
    cpu, cuda = (
        drift_of_model(AuditedModel.of(sharp_llama().to(device)), rows, series, [0, 16, 100_000])
        for device in ("cpu", "cuda")
    )
    for here, there in zip(cpu.drift, cuda.drift, strict=True):
        if here.delta1 == here.delta2:
            assert there.D == 0
        elif here.dtype == "float64":
            assert there.D < 1e-7
        else:
            # Sums of products in another order: other roundings of the same size.
            assert here.D / 2 < there.D < 2 * here.D, here


def test_a_whole_audit_on_cuda():
    found = audit_model(
        sharp_llama().to("cuda"), token_rows(2, 128), AuditSettings(shifts=(0, 16, 1000), ablation_samples=1)
    )
    measured = {mitigation.name for mitigation in found.mitigations if mitigation.D > 0}
    assert {"fused attention", "float32 rotation", "float32 attention", "split product"} <= measured


def test_4096_tokens_of_seven_billion_parameters_fit_in_24_gib():
    """Random weights in Llama 2 7B's shape: the heaviest passes, all in float64, and the logits of two of them."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    runner = Runner(AuditedModel.of(model), 2_000_000)
    ids = torch.randint(0, 32000, (4096,))
    torch.cuda.reset_peak_memory_stats()
    found = [
        runner.run(ids, stock_arithmetic(dtype), shifted(4096, 16))
        for dtype in (torch.float64, torch.bfloat16)
    ]
    assert logit_difference(runner, *found).rms > 0
    assert torch.cuda.max_memory_allocated() < 22 * 2**30
