"""A training step on the device ``meta``, where a stray CPU tensor or a number that the host waits for raises."""

import pytest
import torch
import transformers

from ropewalk import PackedLayout, Row
from ropewalk.attention import packed
from ropewalk.attention.layout import PATTERNS, POSITIONS, next_token_labels
from ropewalk.models.attention import hooks as attention_hooks
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import attach, cast_parameters, checkpoint_activations
from ropewalk.models.rope.rotary import rope_of
from ropewalk.rope import LongRope
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update import step
from ropewalk.training.update.optimizer import MasterAdamW
from tests.meta_cases import META, OneDevice

LENGTH = 40
BFLOAT16 = step.ForwardPass("bfloat16")
SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def model_on(device, kind=transformers.LlamaForCausalLM, dtype=torch.bfloat16, methods=None, exact_rope=True):
    """A model that was checked on the CPU, as users' models are, and its optimizer."""
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES))
    attach(model, methods=methods, exact_rope=exact_rope)
    cast_parameters(model, dtype)
    model.to(device)
    found = LossModel(model, OutputHead.unchecked(model)).train()
    return found, MasterAdamW(found.named_parameters(), Optimizer())


def rows_of(pattern, positions="continuous"):
    """Four rows, the last one interleaved."""
    layouts = [
        PackedLayout.from_lengths(lengths, pattern, 1, positions) for lengths in ([39], [1, 20, 18], [9, 30])
    ]
    layouts.append(PackedLayout.from_segments([9, 10, 20], [0, 1, 0], pattern, 1, positions))
    ids = torch.arange(LENGTH) % 31
    return [Row(ids, next_token_labels(ids, layout), layout) for layout in layouts]


@pytest.fixture
def read(monkeypatch):
    """The one place where a step waits for its device, and how often it did."""
    calls = []

    def answered(*numbers):
        assert {number.device for number in numbers} == {META}
        calls.append(len(numbers))
        return [1.0] * sum(number.numel() for number in numbers)

    monkeypatch.setattr(step, "_read", answered)
    return calls


def train(read, model, optimizer, rows, rows_per_batch=2):
    """A step of two passes, which shows what each pass waits for, or of one a row."""
    with OneDevice():
        batches = step.micro_batches(rows, rows_per_batch)
        result = step.train_step(model, batches, optimizer, 1e-3, BFLOAT16)
    assert result.applied
    assert result.tokens == len(rows) * LENGTH
    assert result.trained_tokens == sum(int((row.labels >= 0).sum()) for row in rows)
    # Loss and gradient norm decide whether weights are updated: the host must know them, both at once.
    assert read == [2]


# Every pair of a pattern, a kind of positions and a number of rows.
@pytest.mark.parametrize(
    ("pattern", "positions", "rows_per_batch"),
    [
        (pattern, kind, 1 + (number + place) % 2)
        for number, pattern in enumerate(PATTERNS)
        for place, kind in enumerate(POSITIONS)
    ],
)
def test_a_step_waits_for_its_device_once(read, pattern, positions, rows_per_batch):
    train(read, *model_on(META), rows_of(pattern, positions), rows_per_batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_a_step_with_masters_and_checkpointing(read, monkeypatch, dtype, again):
    if dtype == torch.float32:
        # Its engine on a GPU is flex, which torch knows no meta kernel of; sdpa stands in for it.
        monkeypatch.setattr("ropewalk.attention.engines.capabilities.PREFERRED", ("sdpa",))
    model, optimizer = model_on(META, dtype=dtype)
    if again:
        checkpoint_activations(model.model)
    train(read, model, optimizer, rows_of("anchor"))


@pytest.mark.parametrize(
    "kind",
    [
        transformers.MistralForCausalLM,
        transformers.Qwen2ForCausalLM,
        transformers.Qwen3ForCausalLM,
        transformers.Phi3ForCausalLM,
        transformers.Olmo2ForCausalLM,
        transformers.SmolLM3ForCausalLM,
    ],
)
def test_other_decoders_wait_no_more_often(read, kind):
    train(read, *model_on(META, kind), rows_of("anchor"))


@pytest.mark.parametrize("router_aux_loss", [0.0, 0.1])
def test_routing_is_read_with_the_loss(read, router_aux_loss):
    model, optimizer = model_on(META, transformers.MixtralForCausalLM)
    with OneDevice():
        batches = step.micro_batches(rows_of("anchor"), 2)
        forward = step.ForwardPass("bfloat16", router_aux_loss=router_aux_loss)
        result = step.train_step(model, batches, optimizer, 1e-3, forward)
    assert read == [3]
    assert [len(each) for each in result.routing.counts] == [8, 8]
    assert result.routing.aux_loss == (1.0 if router_aux_loss else None)


def test_a_rope_that_depends_on_the_length_takes_it_from_the_layouts(read):
    factors = (1.0,) * 4
    method = LongRope(8, 10000.0, factors, tuple(2 * f for f in factors), 1.0, 16)
    model, _ = model_on("cpu")
    with rope_of(model.model, method):
        model.to(META)
        train(read, model, MasterAdamW(model.named_parameters(), Optimizer()), rows_of("anchor", "reset"), 2)


def test_transformers_own_rotary_module_stays_on_the_device(read):
    train(read, *model_on(META, exact_rope=False), rows_of("anchor"))


def test_what_is_prepared_is_not_made_in_the_step(read, monkeypatch):
    model, optimizer = model_on(META)
    # Frequencies are copied once in a model's life.
    step.train_step(model, step.micro_batches(rows_of("anchor"), 2), optimizer, 1e-3, BFLOAT16)
    batches = step.prepare(step.micro_batches(rows_of("anchor"), 2), "varlen", META)
    monkeypatch.setattr(packed, "plan", lambda *args: pytest.fail("a plan is made in the step"))
    with OneDevice() as mode:
        step.train_step(model, batches, optimizer, 1e-3, BFLOAT16)
    # Token ids and labels of each micro-batch; positions and plans were there.
    assert mode.copied == 2 * len(batches)


@pytest.mark.parametrize("precision", ["bfloat16-autocast", "bfloat16"])
def test_attention_meets_16_bits_under_every_narrow_precision(monkeypatch, precision):
    """varlen takes nothing else; and there is no autocast on the device meta."""
    met = []
    sound = attention_hooks.attend

    def recorded(query, key, value, *args):
        met.append((query.dtype, key.dtype, value.dtype))
        return sound(query, key, value, *args)

    monkeypatch.setattr(attention_hooks, "attend", recorded)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    for kind in (transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM):
        model, optimizer = model_on("cpu", kind, dtype)
        batches = step.micro_batches(rows_of("anchor"), 2)
        step.train_step(model, batches, optimizer, 1e-3, step.ForwardPass(precision))
    assert set(met) == {(torch.bfloat16,) * 3}
