"""Rows with short and with long factors of one longrope in a batch; spawned processes import it by name."""

from contextlib import ExitStack
from unittest.mock import patch

import torch

from ropewalk import PackedLayout
from ropewalk.models.load import attach, checkpoint_activations
from ropewalk.models.rope.rotary import rope_of, rotary_module
from ropewalk.parallel import MeshShape, ShardedLayouts, make_mesh
from ropewalk.rope import LongRope, RotaryEmbedding, RotaryRows
from tests.longrope_cases import ORIGINAL, TARGET, VOCABULARY, tiny

PAIRS = 4
ROPE = LongRope(2 * PAIRS, 1e4, (1.0,) * PAIRS, tuple(1.0 + 2 * i for i in range(PAIRS)), 1.2, ORIGINAL)
LAYOUTS = (
    PackedLayout.from_lengths([TARGET], "full", 0),
    PackedLayout.from_lengths([30, ORIGINAL, 41, 25, ORIGINAL], "intra_document", 0, "reset"),
    PackedLayout.from_lengths([100, TARGET - 101], "anchor"),
    # Interleaved documents, each in two pieces.
    PackedLayout.from_segments(
        [20, ORIGINAL, 28, 32, 16, 48], [0, 1, 0, 2, 2, 3], "intra_document", 0, "reset"
    ),
)
"""Rows of one length, two for each list of factors."""
SHORT = (False, True, False, True)


def model_of(dtype=torch.float64):
    model = tiny(head_dim=2 * PAIRS).to(dtype)
    attach(model)
    return model


def ids():
    return torch.randint(3, VOCABULARY, (len(LAYOUTS), TARGET), generator=torch.Generator().manual_seed(1))


def outcome(model, ids, layouts, weights):
    """Logits, and the gradients of a weighted sum of them."""
    model.zero_grad()
    logits = model(input_ids=ids, layout=layouts, use_cache=False).logits
    (logits * weights[..., None]).sum().backward()
    gradients = [parameter.grad.detach().clone() for parameter in model.parameters()]
    return logits.detach(), gradients


def weights():
    return torch.rand(len(LAYOUTS), TARGET, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def alone(model):
    """Logits of each row by itself under the RoPE of its kind as a plain method, and the sum of their gradients."""
    found, sums = [], None
    # The original RoPE with the config's attention factor, and the rescaled one: neither depends on a length.
    plain = {
        short: LongRope(ROPE.rotary_dim, 1e4, factors, factors, ROPE.attention_factor, ORIGINAL)
        for short, factors in ((True, ROPE.short_factor), (False, ROPE.long_factor))
    }
    for row, layout in enumerate(LAYOUTS):
        with rope_of(model, plain[SHORT[row]]):
            logits, gradients = outcome(model, ids()[[row]], [layout], weights()[[row]])
        found.append(logits[0])
        sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
    return torch.stack(found), sums


def the_longest_decides(stack):
    """As without lengths of rows: all rows of a batch have the factors of the longest."""
    own = RotaryEmbedding.pinned
    stack.enter_context(patch.object(RotaryEmbedding, "pinned_rows", lambda self, n: own(self, max(n))))


def each_call_decides(stack):
    """As in transformers: the positions that a rank sees decide."""

    def pinned_rows(self, lengths):
        return ExitStack()

    stack.enter_context(patch.object(RotaryEmbedding, "pinned_rows", pinned_rows))


def in_one_batch(broken=None, checkpointed=False, rows_module=False):
    """Largest differences of logits and gradients between a batch of all rows and each row alone."""
    model = model_of()
    expected = alone(model)
    parent, attribute, _ = rotary_module(model)
    if rows_module:
        setattr(parent, attribute, RotaryRows([ROPE] * len(LAYOUTS)))
    else:
        setattr(parent, attribute, RotaryEmbedding(ROPE))
    if checkpointed:
        checkpoint_activations(model.train())
    with ExitStack() as stack:
        if broken is not None:
            broken(stack)
        logits, gradients = outcome(model, ids(), list(LAYOUTS), weights())
    return differences(logits, gradients, *expected)


def differences(logits, gradients, expected, sums):
    assert min(float(each.abs().max()) for each in (expected, *sums)) > 1e-3
    return (
        float((logits - expected).abs().max() / expected.abs().max()),
        max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, sums, strict=True)),
    )


def on_ranks(shape, broken=None, checkpointed=False):
    """The same on a mesh: of this rank's tokens, and of the ranks' gradients summed."""
    mesh, model = make_mesh(MeshShape(**shape), "cpu"), model_of()
    expected, sums = alone(model)
    parent, attribute, _ = rotary_module(model)
    setattr(parent, attribute, RotaryEmbedding(ROPE))
    if checkpointed:
        checkpoint_activations(model.train())
    sharded = ShardedLayouts.of(LAYOUTS, mesh.groups)
    with ExitStack() as stack:
        if broken is not None:
            broken(stack)
        held = sharded.take(list(ids()), 0)
        logits, gradients = outcome(model, held, sharded, sharded.take(list(weights()), 0.0))
    for each in gradients:
        torch.distributed.all_reduce(each)
    index = sharded.take([torch.arange(TARGET)] * len(LAYOUTS), -1)
    theirs = torch.stack([row[at.clamp_min(0)] for row, at in zip(expected, index, strict=True)])
    real = (index >= 0)[..., None]
    error = float(((logits - theirs) * real).abs().max() / theirs.abs().max())
    return error, max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, sums, strict=True)
    )
