"""Which engine can do what: known before a GPU is asked, and every refusal names one that can."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import EngineError
from ropewalk.attention import ENGINES, AttentionSpec, check_engine, resolve_engine, why_not


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("varlen", {"dtype": torch.float32}, "needs bfloat16 or float16, got torch.float32; use engine flex"),
        ("varlen", {"softcap": 50.0}, r"not support a soft cap \(softcap=50.0\); use engine flex"),
        ("varlen", {"head_dim": 288}, "up to 256, got 288 for keys and 288 for values; use engine sdpa"),
        (
            "varlen",
            {"head_dim": 100},
            "a multiple of 8 up to 256, got 100 for keys and 100 for values; use engine flex",
        ),
        (
            "varlen",
            {"value_dim": 32},
            "the same head dimension.*got 64 for keys and 32 for values; use engine flex",
        ),
        (
            "varlen",
            {"capability": (7, 5)},
            "capability 8.0 or higher, but this GPU has 7.5; use engine sdpa",
        ),
        (
            "flex",
            {"capability": (7, 5)},
            "capability 8.0 or higher, but this GPU has 7.5; use engine sdpa",
        ),
        ("flex", {"dtype": torch.float64}, "float16 on CUDA, got torch.float64; use engine sdpa"),
        (
            "flex",
            {"dtype": torch.float32, "head_dim": 8},
            "at least 16 on CUDA, got 8 for keys and 8 for values; use engine sdpa",
        ),
        ("flex", {"value_dim": 8}, "at least 16 on CUDA, got 64 for keys and 8 for values; use engine"),
        (
            "flex",
            {"head_dim": 192, "value_dim": 128, "capability": (8, 6)},
            "capability 8.6 has, with head dimensions of 192 for keys and 128 for values",
        ),
        (
            "flex",
            {"head_dim": 512},
            "more shared memory .* of 512 for keys and 512 for values in torch.bfloat16",
        ),
        ("flex", {"device": "cpu"}, "flex has no backward on cpu.*; use engine sdpa"),
        ("varlen", {"device": "cpu"}, "varlen needs CUDA, but the tensors are on cpu; use engine sdpa"),
        (
            "flash",
            {},
            "unknown attention engine 'flash'; choose one of auto, reference, sdpa, flex, varlen",
        ),
    ],
)
def test_what_an_engine_needs_is_known_before_a_gpu_is_asked(engine, options, message):
    with pytest.raises(EngineError, match=message):
        check_engine(engine, spec_of(**options))


def spec_of(**options):
    return AttentionSpec(**{"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64, **options})


@given(
    device=st.sampled_from(["cpu", "cuda", "meta"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    head_dim=st.integers(1, 600),
    value_dim=st.none() | st.integers(1, 600),
    softcap=st.sampled_from([None, 30.0]),
    sinks=st.booleans(),
    ring=st.booleans(),
    one_run=st.booleans(),
    capability=st.sampled_from([(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]),
)
def test_auto_takes_an_engine_that_can_and_refusals_name_one(**options):
    spec = AttentionSpec(**options)
    chosen = resolve_engine(spec)
    assert why_not(chosen, spec) is None
    assert check_engine("auto", spec) == check_engine(chosen, spec) == chosen
    for engine in ENGINES:
        reason = why_not(engine, spec)
        if reason is None:
            assert check_engine(engine, spec) == engine
        else:
            with pytest.raises(EngineError, match=f"engine {engine} .*; use engine {chosen}"):
                check_engine(engine, spec)


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"device": "cpu"}, "sdpa"),
        ({}, "varlen"),
        ({"device": "meta"}, "varlen"),
        ({"head_dim": 256, "dtype": torch.float16}, "varlen"),
        ({"dtype": torch.float32}, "flex"),
        ({"softcap": 50.0}, "flex"),
        ({"sinks": True}, "varlen"),
        ({"softcap": 50.0, "head_dim": 256}, "flex"),
        # FlashAttention wants a multiple of 8, and as wide values as heads.
        ({"head_dim": 100}, "flex"),
        ({"head_dim": 36}, "flex"),
        ({"head_dim": 192, "value_dim": 128}, "flex"),
        # Triton's products want 16 columns at least.
        ({"head_dim": 8}, "varlen"),
        ({"head_dim": 8, "dtype": torch.float32}, "sdpa"),
        ({"head_dim": 12}, "sdpa"),
        ({"head_dim": 512}, "sdpa"),
        ({"dtype": torch.float64}, "sdpa"),
        ({"capability": (7, 5)}, "sdpa"),
        # 99 KiB of shared memory hold no tiles of 192 columns.
        ({"head_dim": 192, "value_dim": 128, "capability": (8, 6)}, "sdpa"),
        ({"head_dim": 192, "capability": (8, 6)}, "varlen"),
        ({"ring": True}, "varlen"),
        # Hopper runs cuDNN for rows of one run, where its heads allow it.
        ({"one_run": True}, "varlen"),
        ({"capability": (9, 0)}, "varlen"),
        ({"one_run": True, "capability": (9, 0)}, "sdpa"),
        ({"one_run": True, "capability": (9, 0), "ring": True}, "sdpa"),
        ({"one_run": True, "capability": (9, 0), "sinks": True}, "sdpa"),
        ({"one_run": True, "capability": (9, 0), "softcap": 50.0}, "flex"),
        ({"one_run": True, "capability": (9, 0), "head_dim": 100}, "flex"),
        ({"one_run": True, "capability": (10, 0)}, "varlen"),
        ({"ring": True, "head_dim": 100}, "sdpa"),
    ],
)
def test_auto_names_the_engine_of_each_device(options, engine):
    assert resolve_engine(spec_of(**options)) == engine
