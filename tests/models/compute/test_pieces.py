"""Pieces of models in training: the same bits without a compiler, and with one the same numbers without breaks."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from ropewalk import PackedLayout
from ropewalk.models.attention import hooks
from ropewalk.models.compute import pieces
from ropewalk.models.compute.pieces import fuse_pieces
from ropewalk.models.load import attach, cast_parameters, checkpoint_activations
from tests.marks import slow_after
from tests.models.families import ATTENTIONS, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""torch's compiler asks for it, and hides its warning in a way that turning warnings into errors forestalls."""

FAMILIES = list(dict.fromkeys(["llama", "gpt_oss", "gemma3", "qwen3", *ATTENTIONS]))
ALIKE = ("mistral", "ministral", "gemma4", "glm4_moe_lite")
"""Families whose pieces are, word for word, those of llama, qwen2, gemma4 with experts, and deepseek_v3."""
LENGTHS = [(12, 9, 20, 7), (5, 31, 2, 10), (23, 25)]
"""Documents of three rows of one length."""
ROUNDING = 1024 * 2.0**-23
"""Of a parameter's largest gradient: float32 rounds each of a few hundred terms that are summed in another order."""


def model_of(family, dtype):
    model = tiny_model(family, sharp=family in ATTENTIONS, shallow=True)
    # Before the cast, which would round the frequencies that attach compares with. Granite SWA has two rotary modules.
    attach(model, "reference", exact_rope=family != "granite_swa")
    cast_parameters(model, dtype)
    return model.train()


def row(lengths):
    layout = PackedLayout.from_lengths(lengths, "anchor", 1, "reset")
    ids = torch.randint(
        3, 90, (1, layout.total_length), generator=torch.Generator().manual_seed(len(lengths))
    )
    return ids, layout


def outcome(model, lengths):
    """Logits of a row and the gradients of all parameters."""
    ids, layout = row(lengths)
    model.zero_grad()
    logits = model(ids, layout=layout).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits.float() * cotangent).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def no_more_graphs():
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("family", slow_after(4, FAMILIES))
def test_without_a_compiler_every_bit_is_the_same(family):
    """In bfloat16, where norms save their input alone and rotations round at once."""
    plain = model_of(family, torch.bfloat16)
    ours = copy.deepcopy(plain)
    assert fuse_pieces(ours) == []
    for model in (plain, ours):
        checkpoint_activations(model)
    expected, found = outcome(plain, LENGTHS[0]), outcome(ours, LENGTHS[0])
    assert torch.equal(found[0], expected[0])
    assert equal(found[1], expected[1])


# The layers of the others are computed again alone, which runs all that a plain backward does.
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    slow_after(
        4,
        [
            *((family, False) for family in FAMILIES[:2]),
            *((family, True) for family in FAMILIES if family not in ALIKE),
        ],
    ),
)
def test_compiled_pieces_give_the_same_numbers_without_recompilation(family, checkpointing):
    """Forward to the bit, gradients within float32's rounding, whatever the documents of a row."""
    plain = model_of(family, torch.float32)
    ours = copy.deepcopy(plain)
    assert fuse_pieces(ours, "aot_eager") == []
    if checkpointing:
        checkpoint_activations(ours)
    for number, lengths in enumerate(LENGTHS):
        expected = outcome(plain, lengths)
        if number:
            with no_more_graphs():
                found = outcome(ours, lengths)
        else:
            found = outcome(ours, lengths)
        assert torch.equal(found[0], expected[0])
        assert found[1].keys() == expected[1].keys()
        for name, gradient in found[1].items():
            off = (gradient - expected[1][name]).abs().max()
            assert off <= ROUNDING * expected[1][name].abs().max(), name
    # Norms unless they are torch's own, MLPs or experts, and rotations; none of which breaks.
    assert counters["stats"]["unique_graphs"] >= (2 if family == "starcoder2" else 3)
    assert not counters["graph_break"]


def test_compiled_pieces_in_bfloat16_round_where_the_model_does():
    plain = model_of("llama", torch.bfloat16)
    ours = copy.deepcopy(plain)
    fuse_pieces(ours, "aot_eager")
    assert torch.equal(outcome(ours, LENGTHS[0])[0], outcome(plain, LENGTHS[0])[0])


@pytest.mark.slow
def test_a_packed_row_equals_its_documents_with_compiled_pieces():
    model = model_of("llama", torch.float32)
    fuse_pieces(model, "aot_eager")
    layout = PackedLayout.from_lengths(LENGTHS[0], "intra_document", 0, "reset")
    ids = torch.randint(3, 90, (1, layout.total_length))
    packed = model(ids, layout=layout).logits
    alone = [
        model(part, layout=PackedLayout.from_lengths([part.shape[1]], "intra_document", 0, "reset")).logits
        for part in ids.split(LENGTHS[0], dim=1)
    ]
    torch.testing.assert_close(
        packed, torch.cat(alone, dim=1), rtol=0, atol=ROUNDING * float(packed.detach().abs().max())
    )


def test_evaluation_compiles_nothing():
    model = model_of("llama", torch.float32)
    fuse_pieces(model, "aot_eager")
    ids, layout = row(LENGTHS[0])
    with torch.no_grad():
        model.eval()(ids, layout=layout)
    assert not counters["stats"]


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("ministral3", torch.float32)]
)
def test_rotated_queries_are_rounded_at_once_unless_the_model_computes_with_them(family, dtype, monkeypatch):
    """Ministral 3 scales them by their positions, which must not see a rounding that attention alone makes."""
    seen = []
    tuned = hooks._tuned_by_position
    monkeypatch.setattr(
        hooks, "_tuned_by_position", lambda module, q, p: seen.append(q.dtype) or tuned(module, q, p)
    )
    model = model_of(family, torch.bfloat16)
    outcome(model, LENGTHS[0])
    assert set(seen) == {torch.float32}
    seen.clear()
    fuse_pieces(model)
    outcome(model, LENGTHS[0])
    assert set(seen) == {dtype}


def adds(self, x, cos, sin):
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    q = torch.cat((q, x), dim=-1)
    return attention(self, q, k) * 2  # noqa: F821


def norms(self, x, cos, sin):
    x = self.norm(x)
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    return attention(self, self.norm(q), k)  # noqa: F821


def scales(self, x, cos, sin):
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    q = torch.cat((q, x), dim=-1)
    return attention(self, q * 0.5, k)  # noqa: F821


def asks(self, x, cos, sin):
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    return attention(self, q, k, x.to(k.dtype))  # noqa: F821


def moves(self, x, cos, sin):
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    q = q.transpose(1, 2).reshape(q.shape[0], -1)
    return attention(self, q, k)  # noqa: F821


def repeats(self, x, cos, sin):
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    k = k.repeat(1, 2, 1, 1)
    return attention(self, q, k)  # noqa: F821


def stores(self, x, cos, sin, shared):
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    shared[self.layer_type] = k, x
    return attention(self, q, k)  # noqa: F821


def widens(self, x, cos, sin):
    q, k = apply_rotary(x, x, cos, sin)  # noqa: F821
    return attention(self, q.float(), k)  # noqa: F821


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        *((forward, True) for forward in (adds, moves)),
        *((forward, False) for forward in (norms, scales, asks, repeats, stores, widens)),
    ],
)
def test_a_forward_is_read_for_what_it_does_with_rotated_queries(forward, expected):
    assert pieces._passes_on(forward, ["apply_rotary"]) is expected


def test_experts_that_run_one_by_one_are_named_and_left():
    plain = model_of("mixtral", torch.float32)
    plain.set_experts_implementation("eager")
    ours = copy.deepcopy(plain)
    assert fuse_pieces(ours, "aot_eager") == ["MixtralExperts (it runs one expert after the other)"]
    assert torch.equal(outcome(ours, LENGTHS[0])[0], outcome(plain, LENGTHS[0])[0])


@pytest.mark.parametrize(
    ("family", "left"),
    [
        ("llama", "LlamaMLP (it has an adapter inside)"),
        ("mixtral", "MixtralExperts (it has an adapter inside)"),
    ],
)
def test_mlps_with_an_adapter_are_named_and_left(family, left):
    peft = pytest.importorskip("peft")
    plain = model_of(family, torch.float32)
    targets = r".*(q_proj|v_proj|gate_proj|up_proj|down_proj)$"
    parameters = ["experts.gate_up_proj"] if family == "mixtral" else None
    config = peft.LoraConfig(target_modules=targets, target_parameters=parameters, init_lora_weights=False)
    peft.inject_adapter_in_model(config, plain)
    ours = copy.deepcopy(plain)
    assert fuse_pieces(ours, "aot_eager") == [left]
    outcome(ours, LENGTHS[0])
    with no_more_graphs():
        found = outcome(ours, LENGTHS[1])
    expected = outcome(plain, LENGTHS[1])
    assert torch.equal(found[0], expected[0])
    for name, gradient in found[1].items():
        torch.testing.assert_close(
            gradient, expected[1][name], rtol=0, atol=ROUNDING * float(gradient.abs().max())
        )


def test_a_fused_model_can_be_copied_and_keeps_its_class():
    model = model_of("llama", torch.bfloat16)
    names = [type(module) for module in model.modules()]
    fuse_pieces(model)
    assert [type(module) for module in model.modules()] == names
    other = copy.deepcopy(model)
    norm = other.model.norm
    assert norm.forward.__self__ is norm
    assert model.state_dict().keys() == other.state_dict().keys()
