"""What ranks run in the tests of states that pass between ranks; spawned processes import it by name."""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ropewalk import PackedLayout
from ropewalk.models.attention import passed_states
from ropewalk.models.attention.recurrent import mixers_of
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach, checkpoint_activations
from ropewalk.parallel import MeshShape, ShardedLayouts, make_mesh
from ropewalk.parallel.fragments import Fragments, fragments_of, passed_bytes
from ropewalk.parallel.traffic import counted_traffic
from tests.models.attention import standin_kernels
from tests.models.families import tiny_model

LONG = (
    PackedLayout.from_segments([9, 21, 4, 7, 12], [1, 0, 2, 1, 0], "anchor", 2),
    PackedLayout.from_lengths([23, 5, 26], "intra_document", 1, "reset"),
    PackedLayout.from_lengths([25, 30], "full", 0),
)
"""Rows of one batch: an anchor of two tokens and documents in pieces, documents, and one run."""
SHORT = (
    PackedLayout.from_lengths([8], "anchor"),
    PackedLayout.from_segments([2, 3, 4], [1, 0, 1], "intra_document", 0),
    PackedLayout.from_lengths([9], "full", 0),
)
"""Rows of 9 tokens: halos of 3 lie in several fragments, and a rank of four that take equal parts has none."""
UNEVEN = (PackedLayout.from_lengths([16, 16, 32], "intra_document", 0),)
"""A row whose last half alone is cut if four ranks take contiguous parts."""


@dataclass(frozen=True)
class Cut:
    """A batch of rows and the way that it is cut over four ranks."""

    layouts: tuple[PackedLayout, ...]
    balance: str = "auto"
    ring: int = 4
    sequence: int = 1


CUTS = {
    "contiguous": Cut(LONG, "contiguous"),
    "zigzag": Cut(LONG, "zigzag"),
    "cost": Cut(LONG, "cost"),
    "sequence": Cut(LONG, ring=1, sequence=4),
    "ring x sequence": Cut(LONG, "zigzag", 2, 2),
    "short": Cut(SHORT, "zigzag"),
    "short sequence": Cut(SHORT, ring=1, sequence=4),
    "uneven": Cut(UNEVEN, "contiguous"),
}


@contextmanager
def in_float64():
    """transformers computes norms and recurrences in float32 in any model, which would hide small errors."""
    before = torch.get_default_dtype()
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def no_halo(stack):
    stack.enter_context(
        patch.object(Fragments, "halos", lambda self, rank, width: _halos(self, rank, width, 0))
    )


def halo_of_one_fragment(stack):
    stack.enter_context(
        patch.object(Fragments, "halos", lambda self, rank, width: _halos(self, rank, width, 1))
    )


_own_halos = Fragments.halos


def _halos(fragments, rank, width, reach):
    """Halos that reach into no more than the ``reach`` fragments before."""
    (mine,) = np.nonzero(fragments.owners == rank)
    own = _own_halos(fragments, rank, width)
    return np.where(own < fragments.starts[np.maximum(mine - reach, 0)][:, None], -1, own)


def no_state(stack):
    def zeros(added, factors, plan, group):
        states = 1 + sum(map(len, plan.steps))
        return added.new_zeros(states, *added.shape[1:])

    stack.enter_context(patch.object(passed_states, "incoming_states", zeros))


def late_limit(stack):
    """Step sizes of Mamba-2 that are at least 0.001 in padding, too."""
    own = passed_states._Ranks.recur

    def recur(self, inputs, summarize, compute):
        return own(
            self,
            inputs,
            lambda batch, x, dt, *rest: summarize(batch, x, dt.clamp(min=1e-3), *rest),
            lambda batch, state, x, dt, *rest: compute(batch, state, x, dt.clamp(min=1e-3), *rest),
        )

    stack.enter_context(patch.object(passed_states._Ranks, "recur", recur))


def differences(families, cuts, broken=None, checkpointed=False, trained=""):
    """For each family and cut the differences of logits and of gradients from whole rows, over the largest value.

    Args:
        families: families of models.
        cuts: names of cuts.
        broken: breaks something while a stack is open.
        checkpointed: whether layers are computed again in the backward.
        trained: a part of the names of parameters that have gradients.
    """
    with in_float64(), ExitStack() as stack:
        if broken is not None:
            broken(stack)
        return {
            (family, cut): worst
            for family in families
            for cut, worst in _of(_model(family, checkpointed, trained), cuts)
        }


def _model(family, checkpointed=False, trained=""):
    model = tiny_model(family, torch.float64, sharp=True, shallow=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    attach(model, engine="sdpa", exact_rope=False)
    if checkpointed:
        checkpoint_activations(model.train())
    return model


def with_kernels(family, cuts):
    """The same in training with stand-ins for the kernels, and for each kernel what it was given on this rank.

    Args:
        family: family of the model.
        cuts: names of cuts.
    """
    with in_float64(), pytest.MonkeyPatch.context() as patched:
        plain = tiny_model(family, torch.float64, sharp=True, shallow=True)
        mixer = mixers_of(plain, ModelConfig.of(plain.config))[0]
        calls = standin_kernels.install(patched, type(mixer))
        given = {}
        found = {(family, cut): worst for cut, worst in _of(_model(family).train(), cuts, calls)}
        for name, arguments in calls:
            given.setdefault(name, set()).update(arguments)
        return found, given


def rounding_errors(family):
    """Root mean square errors of logits in bfloat16, over that of the logits: on ranks, and of whole rows."""
    mesh, errors = make_mesh(MeshShape(ring=4), "cpu"), []
    exact = tiny_model(family, torch.float64, sharp=True, shallow=True)
    for parameter in exact.parameters():
        # Attention less sharp, so that rounding is not amplified, and values that bfloat16 has.
        parameter.data = (parameter.data * 0.3).bfloat16().double()
    models = [exact, copy.deepcopy(exact).to(torch.bfloat16)]
    for model in models:
        attach(model, engine="sdpa", exact_rope=False)
    ids = torch.randint(3, 90, (len(LONG), LONG[0].total_length), generator=torch.Generator().manual_seed(1))
    sharded = ShardedLayouts.of(LONG, mesh.groups, "cost")
    with torch.no_grad():
        expected, whole = (model(input_ids=ids, layout=list(LONG)).logits.double() for model in models)
        mine = models[1](input_ids=sharded.take(list(ids), 0), layout=sharded).logits.double()
    index = sharded.take([torch.arange(ids.shape[1])] * len(LONG), -1)
    for found in (mine, torch.stack([row[at] for row, at in zip(whole, index, strict=True)])):
        theirs = torch.stack([row[at] for row, at in zip(expected, index, strict=True)])
        error = (found - theirs)[index >= 0].square().sum()
        dist.all_reduce(error)
        errors.append(float((error / expected.square().sum()).sqrt()))
    return errors


def sent_bytes(family, cuts):
    """For each cut the bytes that a mixer sends in a forward and a backward, and the channels of its convolution.

    The bytes are (counted, as :func:`passed_bytes` has them from the layouts) for each of the two.
    """
    found = []
    model = tiny_model(family, sharp=True, shallow=True)
    config = ModelConfig.of(model.config)
    mixer = mixers_of(model, config)[0]
    convolution = getattr(mixer, "conv1d", getattr(mixer, "conv", None))
    width, channels = (
        (0, 0) if convolution is None else (convolution.kernel_size[0] - 1, len(convolution.weight))
    )
    numbers = SUMMARIES[family](mixer)
    for name in cuts:
        cut = CUTS[name]
        groups = make_mesh(MeshShape(ring=cut.ring, sequence=cut.sequence), "cpu").groups
        sharded = ShardedLayouts.of(cut.layouts, groups, cut.balance)
        hidden = torch.randn(len(cut.layouts), sharded.shard_length, 32, requires_grad=True)
        with counted_traffic() as forward:
            output = passed_states.passed(mixer, config.mixer.recurrence, sharded, hidden)
        output = output[0] if isinstance(output, tuple) else output
        with counted_traffic() as backward:
            output.sum().backward()
        fragments = fragments_of(sharded.layouts, sharded.rows)
        planned = passed_bytes(fragments, groups.rank, width, 4 * channels, 4 * numbers)
        found.append(tuple(zip((forward.total, backward.total), planned, strict=True)))
    return found


SUMMARIES = {
    "qwen3_next": lambda mixer: mixer.num_v_heads * mixer.head_k_dim * (mixer.head_k_dim + mixer.head_v_dim),
    "nemotron_h": lambda mixer: mixer.num_heads * (mixer.head_dim * mixer.ssm_state_size + 1),
    "minimax": lambda mixer: mixer.num_attention_heads * (mixer.head_dim**2 + 1),
    "lfm2": lambda mixer: 0,
}
"""Numbers in the summary of a fragment."""


def _of(model, cuts, calls=()):
    expected = {}
    for name in cuts:
        cut = CUTS[name]
        if cut.layouts not in expected:
            expected[cut.layouts] = _whole(model, cut.layouts)
        ids, cotangent, logits, gradients = expected[cut.layouts]
        mesh = make_mesh(MeshShape(ring=cut.ring, sequence=cut.sequence), "cpu")
        # Plans are kept as long as the first row lives, and what whole rows call is not of interest.
        fragments_of.forget()
        calls and calls.clear()
        sharded = ShardedLayouts.of(cut.layouts, mesh.groups, cut.balance)
        index = sharded.take([torch.arange(len(each[0])) for each in logits[:, None]], -1)
        held, places = index >= 0, index.clamp(min=0)
        mine = [
            torch.stack([row[at] for row, at in zip(x, places, strict=True)])
            for x in (ids, cotangent, logits)
        ]
        found = model(input_ids=mine[0], layout=sharded).logits
        (found * mine[1])[held].sum().backward()
        own = _taken(model)
        for each in own:
            dist.all_reduce(each)
        errors = torch.stack(
            [
                (found.detach() - mine[2])[held].abs().max() if held.any() else found.new_zeros(()),
                torch.stack([(a - b).abs().max() for a, b in zip(own, gradients, strict=True)]).max(),
            ]
        )
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        size = torch.stack([logits.abs().max(), torch.stack([each.abs().max() for each in gradients]).max()])
        yield name, tuple((errors / size).tolist())


def _whole(model, layouts):
    """Token ids, a cotangent, logits of whole rows and the gradients; rank 0 computes them for all."""
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (len(layouts), layouts[0].total_length))
    cotangent = torch.randn(*ids.shape, 97)
    values = [torch.zeros_like(cotangent), *(torch.zeros_like(each) for each in model.parameters())]
    if dist.get_rank() == 0:
        logits = model(input_ids=ids, layout=list(layouts)).logits
        (logits * cotangent).sum().backward()
        values = [logits.detach(), *_taken(model)]
    for each in values:
        dist.broadcast(each, 0)
    return ids, cotangent, values[0], values[1:]


def _taken(model):
    """The gradients of all parameters, which the model then has no more."""
    taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return taken
