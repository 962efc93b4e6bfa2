"""The fastest engine that is right: times come from a clock that each engine turns, errors from real attention."""

import math
from dataclasses import replace

import pytest
import torch

from ropewalk import EngineError, PackedLayout, attend
from ropewalk.attention import measuring
from ropewalk.attention.flash import installed_flash
from ropewalk.attention.measuring import (
    Candidate,
    LayersAlike,
    Measured,
    fastest,
    kernel_name,
    measure,
    shortened,
)
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.attention.spans import Spans

CPU = torch.device("cpu")
FULL = LayersAlike(3, 4, 2, 16, 16, EVERYTHING)
WINDOW = LayersAlike(2, 4, 2, 16, 16, Locality(window=40))
LAYOUTS = [PackedLayout.from_lengths([50, 70], "anchor"), PackedLayout.from_lengths([100, 20], "anchor")]


class Turned:
    """A clock that stands still except while attention runs, and attention that turns it."""

    def __init__(self, seconds):
        self.seconds, self.now, self.calls = seconds, 0.0, []

    def clock(self):
        return self.now

    def attention(self, q, k, v, engine, options):
        assert q.shape == (2, 4, 121, 16)
        assert v.shape == (2, 2, 121, 16)
        self.calls.append((engine, options.window))
        taken = self.seconds[engine]
        # The first call of each kind compiles.
        self.now += 1000.0 if self.calls.count(self.calls[-1]) == 1 else taken
        return attend(q, k, v, LAYOUTS, engine, options)


def measured(seconds, layers=(FULL, WINDOW), engines=("reference", "sdpa")):
    turned = Turned(seconds)
    found = measure(
        [Candidate(engine) for engine in engines],
        layers,
        LAYOUTS,
        121,
        turned.attention,
        torch.float32,
        CPU,
        turned.clock,
    )
    return found, turned


def test_times_are_those_of_all_layers_without_compilation():
    found, turned = measured({"reference": 0.5, "sdpa": 0.25})
    assert [each.seconds for each in found] == [5 * 0.5, 5 * 0.25]
    assert [each.refusal for each in found] == [None, None]
    assert fastest(found).candidate == Candidate("sdpa")
    assert fastest(found[:1]).candidate == Candidate("reference")
    assert turned.calls.count(("sdpa", 40)) == turned.calls.count(("sdpa", None)) == 1 + measuring.REPEATS
    assert [each.kernels for each in found] == [("dense mask",), ("CPU flash",)]


def test_measuring_leaves_the_random_numbers_of_the_run_alone():
    torch.manual_seed(5)
    drawn = torch.rand(3).tolist()
    torch.manual_seed(5)
    measured({"reference": 0.5, "sdpa": 0.25})
    assert torch.rand(3).tolist() == drawn


@pytest.mark.parametrize("fault", ["documents leak", "no window", "wrong gradient", "not a number"])
def test_a_wrong_kernel_is_never_the_fastest(monkeypatch, fault):
    def wrong(q, k, v, layout, engine, options):
        if engine != "sdpa":
            return attend(q, k, v, layout, engine, options)
        if fault == "documents leak":
            layout = [PackedLayout.from_lengths([each.total_length], "full", 0) for each in layout]
        if fault == "no window":
            options = measuring.AttentionOptions()
        out = attend(q, k, v, layout, engine, options)
        if fault == "wrong gradient":
            return out + 1e-3 * (out - out.detach())
        return out * math.nan if fault == "not a number" else out

    monkeypatch.setattr(measuring, "attend", wrong)
    found, _ = measured({"reference": 0.5, "sdpa": 0.25})
    assert found[1].seconds is None
    assert "times what rounding explains" in found[1].refusal
    assert fastest(found).candidate == Candidate("reference")


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, AssertionError, ValueError])
def test_a_kernel_that_fails_is_not_taken_and_says_why(kind):
    def fails(q, k, v, engine, options):
        if engine == "sdpa":
            raise kind("CUDA out of memory\nmore words")
        return attend(q, k, v, LAYOUTS, engine, options)

    found = measure(
        [Candidate("sdpa"), Candidate("reference")], [FULL], LAYOUTS, 121, fails, torch.float32, CPU
    )
    assert found[0] == Measured(Candidate("sdpa"), (), None, "CUDA out of memory")
    assert fastest(found).candidate.engine == "reference"
    with pytest.raises(
        EngineError, match="no attention engine computes these rows: sdpa: CUDA out of memory"
    ):
        fastest(found[:1])


def test_long_rows_are_cut_until_a_call_is_short(monkeypatch):
    row = PackedLayout.from_lengths([3000, 5000], "full", 0)
    monkeypatch.setattr(measuring, "MOST_FLOPS", FULL.flops(row.first(2000)) * 1.01)
    assert [each.total_length for each in shortened([row], [FULL])] == [2000]
    # Two rows of a batch need twice as much; four ranks share four times as much.
    assert [each.total_length for each in shortened([row, row], [FULL])] == [1000, 1000]
    assert [each.total_length for each in shortened([row], [FULL], ranks=4)] == [4000]
    # Within a window, cost is linear.
    assert [each.total_length for each in shortened([row], [WINDOW])] == [8000]


def test_operations_are_those_of_visible_pairs():
    row = LAYOUTS[0]
    pairs = int(row.dense_mask().sum())
    assert Spans.of(row).pairs == pairs
    assert FULL.flops(row) == (4 + 10) * pairs * 4 * 16


def test_a_kernel_has_the_name_of_what_really_runs(monkeypatch):
    def name(engine, dtype=torch.bfloat16, device="meta", **more):
        layers = replace(FULL, **more)
        q, k, v = (x.to(device) for x in layers.inputs(1, 8, dtype, CPU))
        return kernel_name(engine, q, k, v, layers.softcap)

    assert name("sdpa", device="cpu") == "CPU flash"
    # Without a GPU, meta stands for one of compute capability 8.0, where torch prefers its FlashAttention.
    assert name("sdpa") == name("varlen") == "FlashAttention 2"
    assert name("sdpa", softcap=30.0) == name("sdpa", dtype=torch.float32) == "plain torch"
    assert (name("flex"), name("reference")) == ("FlexAttention", "dense mask")
    # A system's cuDNN that hides torch's own: the backend is named, not the one that was expected.
    for backend in ("cuDNN", "flash"):
        monkeypatch.setattr(measuring, "dense_backend", lambda *_, backend=backend: backend)
        assert name("sdpa") == {"cuDNN": "cuDNN", "flash": "FlashAttention 2"}[backend]
    monkeypatch.setattr(measuring, "active_flash", lambda: "FA4")
    assert name("sdpa") == name("varlen") == "FlashAttention 4"


@pytest.mark.parametrize("engine", ["sdpa", "varlen"])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_engines_of_a_gpu_take_these_inputs(engine, sinks):
    """Forward and backward on the device meta, with the strides and options of the measurement."""
    for layers in (replace(FULL, sinks=sinks), replace(WINDOW, sinks=sinks)):
        inputs = [x.to("meta") for x in layers.inputs(2, 121, torch.bfloat16, CPU)]
        assert inputs[0].stride() == (121 * 4 * 16, 16, 4 * 16, 1)
        options = layers.options(torch.device("meta"))
        seconds = measuring._seconds(
            lambda q, k, v, options=options: attend(q, k, v, LAYOUTS, engine, options), inputs, lambda: 1.0
        )
        assert seconds == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
def test_every_engine_of_a_gpu_can_be_taken(pattern):
    device = torch.device("cuda")
    layouts = [PackedLayout.from_lengths([1500, 500, 3000, 3000], pattern)]
    layers = [LayersAlike(1, 8, 2, 64, 64, EVERYTHING), LayersAlike(1, 8, 2, 64, 64, Locality(window=512))]
    candidates = [Candidate("sdpa"), Candidate("flex")]
    candidates += [
        Candidate("varlen", each) for each in installed_flash(torch.cuda.get_device_capability()[0])
    ]

    def attention(q, k, v, engine, options):
        return attend(q, k, v, layouts, engine, options)

    found = measure(candidates, layers, layouts, layouts[0].total_length, attention, torch.bfloat16, device)
    assert [each.refusal for each in found] == [None] * len(candidates)
    assert all(0 < each.seconds < 10 for each in found)
    assert fastest(found).kernels
    assert found[2].kernels == ("FlashAttention 2",)
