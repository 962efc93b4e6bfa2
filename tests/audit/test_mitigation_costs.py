"""What mitigations cost: memory and time are measured with the right ruler, and what cannot run is a reason."""

import copy
from pathlib import Path

import torch
import transformers
from torch import nn

from ropewalk import PackedLayout
from ropewalk.audit import mitigation_costs as cost
from ropewalk.audit.arithmetic import EXACT, stock_arithmetic
from ropewalk.audit.mitigation_costs import Cost, TimeLimit, mitigation_costs, peak_bytes
from ropewalk.audit.mitigations import changes
from ropewalk.audit.passes import Runner
from ropewalk.models.attention import mitigated as mitigated_attention
from ropewalk.models.attention.intercept import AuditedModel
from ropewalk.models.attention.mitigated import FUSED_MITIGATIONS, attending, copy_in_dtype
from ropewalk.models.load import rotary_module
from ropewalk.models.losses import decoder_of
from tests.models.mitigation_cases import LENGTH, hidden, rms, row, tiny

CPU = torch.device("cpu")
LAYOUT = PackedLayout.from_lengths([40, 30, 26], "full", 0)
MITIGATIONS = tuple(changes(stock_arithmetic(torch.bfloat16), LAYOUT))
ATTENDED = ("fused attention", *FUSED_MITIGATIONS)


def test_model_that_takes_no_attention_function(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *_: False)
    costs = mitigation_costs(
        model, row(), LAYOUT, torch.bfloat16, ["float32 attention", "fused attention"], TimeLimit(1)
    )
    assert costs["float32 attention"] == "LlamaForCausalLM does not accept external attention functions"
    assert isinstance(costs["fused attention"], Cost)


def test_peak_of_known_allocations(capfd):
    """If the profiler counts otherwise some day, this says so: three tensors, of which two live at once."""

    def run():
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(1250, dtype=torch.float64)
        return second, third

    # 4 bytes each of 1000 and 500, then of 500 with 8 each of 1250.
    assert peak_bytes(run, CPU) == 4 * 500 + 8 * 1250
    assert peak_bytes(lambda: None, CPU) == 0
    # The profiler would write to the error stream, which belongs to a progress bar.
    assert capfd.readouterr().err == ""


def test_peak_sees_the_scratch_memory_of_a_kernel():
    x = torch.randn(1, 4, 512, 16)
    output = x.numel() * x.element_size()
    assert (
        peak_bytes(lambda: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), CPU) > output
    )


def test_peak_counts_materialised_scores_and_is_the_same_twice():
    model = copy_in_dtype(tiny("llama"), torch.float32)
    ids = row()[None]

    def run():
        with torch.no_grad():
            decoder_of(model)(ids, use_cache=False)

    with attending(model, "sdpa"):
        run()
        fused = peak_bytes(run, CPU)
        assert peak_bytes(run, CPU) == fused
    with attending(model, "eager"):
        eager = peak_bytes(run, CPU)
    scores = 4 * LENGTH**2 * 4
    assert eager - fused > scores


def test_costs_of_a_model_with_everything():
    model = tiny("llama")
    state = copy.deepcopy(model.state_dict())
    rotary, hooks = rotary_module(model)[2], len(model._forward_pre_hooks)
    costs = mitigation_costs(model, row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(3))
    assert tuple(costs) == MITIGATIONS
    assert costs["tf32 attention"] == "this machine's cpu has no TF32"
    measured = {name: value for name, value in costs.items() if isinstance(value, Cost)}
    assert set(measured) == set(MITIGATIONS) - {"tf32 attention"}
    assert all(value.seconds > 0 and value.peak_bytes > 0 for value in measured.values())
    assert costs["fused attention"].time_ratio == costs["fused attention"].memory_ratio == 1
    # Scores of four heads, 2 x 4 x 96 x 96 bytes, beside hidden states of 2 x 96 x 32.
    assert costs["eager attention"].memory_ratio > 1.5
    assert costs["split product"].memory_ratio > costs["float32 rotation"].memory_ratio
    # The model that was given is the model that was given.
    assert rotary_module(model)[2] is rotary
    assert len(model._forward_pre_hooks) == hooks
    assert model.config._attn_implementation == "sdpa"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_rounds_end_with_the_time_but_not_before_the_third(monkeypatch):
    turns = []
    monkeypatch.setattr(cost._Bench, "seconds", lambda bench, name: turns.append(name) or 1.0)
    mitigation_costs(tiny("llama"), row(), LAYOUT, torch.float32, ["fused attention"], TimeLimit(9, 0))
    assert len(turns) == 3


def test_reference_is_measured_even_if_nobody_asked_for_it():
    costs = mitigation_costs(tiny("llama"), row(), LAYOUT, torch.float32, ["eager attention"], TimeLimit(1))
    assert list(costs) == ["eager attention"]
    assert costs["eager attention"].memory_ratio > 1


def test_eager_attention_is_not_tried_where_its_scores_would_not_fit(monkeypatch):
    monkeypatch.setattr(cost, "EAGER_BYTES", 1000)
    costs = mitigation_costs(tiny("llama"), row(), LAYOUT, torch.float32, ["eager attention"], TimeLimit(1))
    assert costs["eager attention"].startswith("eager attention would materialise")


def test_layers_with_a_window_have_costs_of_every_mitigation():
    costs = mitigation_costs(tiny("mistral"), row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    for name in ("anchor layout", "positions reset", "split product"):
        assert isinstance(costs[name], Cost)


def test_soft_cap_leaves_eager_attention_to_compare_with():
    costs = mitigation_costs(tiny("gemma2"), row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    for name in set(MITIGATIONS) - {"eager attention", "anchor layout", "positions reset"}:
        assert costs[name] == (
            "Gemma2ForCausalLM caps its attention scores at 50, which PyTorch's fused attention does not support"
        )
    assert costs["eager attention"].time_ratio == 1
    assert isinstance(costs["anchor layout"], Cost)
    assert isinstance(costs["positions reset"], Cost)


def test_nothing_to_compare_with(monkeypatch):
    monkeypatch.setattr(cost, "EAGER_BYTES", 1000)
    costs = mitigation_costs(
        tiny("gemma2"), row(), LAYOUT, torch.bfloat16, ["anchor layout", "eager attention"], TimeLimit(1)
    )
    assert "nothing to compare with" in costs["anchor layout"]
    assert "would materialise" in costs["eager attention"]


def test_a_model_that_rounds_after_its_rotation_has_no_float32_attention():
    costs = mitigation_costs(tiny("cohere"), row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    for name in ("split product", "float32 attention"):
        assert "CohereForCausalLM round queries and keys to bfloat16" in costs[name]
    assert isinstance(costs["float32 rotation"], Cost)


def test_what_does_not_fit_is_a_reason(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(mitigated_attention._FUNCTIONS, "float32 attention", full)
    costs = mitigation_costs(
        tiny("llama"), row(), LAYOUT, torch.bfloat16, ["float32 attention"], TimeLimit(1)
    )
    assert costs["float32 attention"] == "cpu memory is too small for float32 attention with 96 tokens"


def test_real_checkpoint(stories260k: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.bfloat16).eval()
    costs = mitigation_costs(model, row(), LAYOUT, torch.bfloat16, MITIGATIONS, TimeLimit(1))
    assert [name for name, value in costs.items() if not isinstance(value, Cost)] == ["tf32 attention"]
    runner = Runner(AuditedModel.of(model), LENGTH)
    exact = runner.run(row(), EXACT, torch.arange(LENGTH)).hidden
    copied = copy_in_dtype(model, torch.bfloat16)
    errors = {name: rms(hidden(copied, name, row()) - exact) for name in ATTENDED}
    budget = 2 * errors["fused attention"] + torch.finfo(torch.bfloat16).eps * rms(exact)
    assert all(error <= budget for error in errors.values()), errors
