"""What ranks run in the tests of passed states; spawned processes import it by name."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ropewalk.attention.layout import PackedLayout
from ropewalk.parallel import MeshShape, RowShards, ShardedLayouts, make_mesh
from ropewalk.parallel.fragments import fragments_of, halo_plan, state_plan, tokens_by_run
from ropewalk.parallel.states import convolve, incoming_states
from ropewalk.testing import random_layout

CPU = torch.device("cpu")
WIDTH = 3


def layouts_of(seed):
    rng = random.Random(seed)
    total = rng.choice([9, 33, 64])
    patterns = ("full", "intra_document", "anchor")
    return [random_layout(total, rng, 4, patterns, rng.random() < 0.5, max_anchor=3) for _ in range(2)]


def recurred(x, factors, state):
    """Outputs ``[tokens, H]`` and the last state ``[H, 2, 2]`` of S = A S + x xᵀ, o = sum of S, token by token."""
    outputs = []
    for each, factor in zip(x, factors, strict=True):
        moved = factor @ state if factor.shape[-1] > 1 else factor * state
        state = moved + each[:, :, None] * each[:, None, :]
        outputs.append(state.sum((1, 2)))
    return torch.stack(outputs), state


def on_whole_rows(x, factors, weight, order, lengths):
    """A convolution ``[tokens, H, 2]`` and the recurrence over it, run by run."""
    outputs = torch.zeros(len(x), x.shape[1], dtype=x.dtype)
    for tokens in order.split(lengths.tolist()):
        inputs = F.pad(x[tokens].flatten(1).T[None], (WIDTH, 0))
        convolved = F.conv1d(inputs, weight, groups=len(weight))[0].T.unflatten(1, x.shape[1:])
        zero = x.new_zeros(x.shape[1], 2, 2)
        outputs = outputs.index_copy(0, tokens, recurred(convolved, factors[tokens], zero)[0])
    return outputs


def on_fragments(x, factors, weight, sharded, by_matrix):
    """The same for this rank's tokens ``[B * n, H, 2]``."""
    groups, rows = sharded.groups, len(sharded.rows)
    fragments = fragments_of(sharded.layouts, sharded.rows)
    halos, plan = halo_plan(fragments, groups.rank, WIDTH, CPU), state_plan(fragments, groups.rank, CPU)
    convolved = convolve(
        x.flatten(1).unflatten(0, (rows, -1)).transpose(1, 2),
        halos,
        groups.row_group,
        lambda x: F.conv1d(F.pad(x, (WIDTH, 0)), weight, groups=len(weight)),
    )
    convolved = convolved.transpose(1, 2).reshape(x.shape)
    parts = plan.tokens.split(plan.lengths.tolist())
    zero = x.new_zeros(x.shape[1], 2, 2)
    states = zero[None]
    if plan.sent.anywhere:
        unit = torch.eye(2, dtype=x.dtype).expand_as(zero)
        # A rank without leading fragments sends nothing, but stays in the graph.
        leading = [parts[number] for number in plan.leading.tolist()] or [plan.tokens[:1]]
        added = torch.stack([recurred(convolved[each], factors[each], zero)[1] for each in leading])
        behind = [recurred(0 * convolved[each], factors[each], unit)[1] for each in leading]
        behind = torch.stack(behind) if by_matrix else torch.stack(behind)[..., :1, :1]
        states = incoming_states(added, behind, plan, groups.row_group)
    outputs = torch.zeros(len(x), x.shape[1], dtype=x.dtype)
    for tokens, state in zip(parts, states[plan.initial], strict=True):
        outputs = outputs.index_copy(0, tokens, recurred(convolved[tokens], factors[tokens], state)[0])
    return outputs


def differences(shape, seeds, by_matrix):
    """For each seed the largest difference of outputs and gradients, relative to the largest value."""
    mesh, found = make_mesh(MeshShape(**shape), "cpu"), []
    for seed in seeds:
        layouts = layouts_of(seed)
        balance = random.Random(seed).choice(["contiguous", "zigzag", "cost"])
        found.append(_difference(layouts, ShardedLayouts.of(layouts, mesh.groups, balance), by_matrix))
    return found


def with_empty_ranks():
    """A row of which two of four ranks hold nothing, and one a piece between two of another's."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    layout = PackedLayout.from_lengths([5, 4], "full", 0)
    row = RowShards(layout.storage_in_order, (((0, 4), (6, 9)), (), ((4, 6),), ()), 1, 8)
    return _difference([layout], ShardedLayouts((layout,), (row,), mesh.groups), True)


def _difference(layouts, sharded, by_matrix):
    torch.manual_seed(0)
    batch, total = len(layouts), layouts[0].total_length
    x = torch.randn(batch * total, 3, 2, dtype=torch.float64)
    factors = torch.randn(batch * total, 3, 2, 2, dtype=torch.float64) * 0.5
    factors = factors if by_matrix else factors[..., :1, :1]
    weight, cotangent = (
        torch.randn(*size, dtype=torch.float64) for size in ((6, 1, WIDTH + 1), (batch * total, 3))
    )
    index = sharded.take([torch.arange(total) + row * total for row in range(batch)], -1).flatten()
    real = index >= 0
    values = []
    for cut in (False, True):
        leaves = [each.clone().requires_grad_() for each in (x, factors, weight)]
        if cut:
            # Padding has numbers of its own, which must reach nobody.
            mine = [each.index_select(0, index.clamp(min=0)) for each in leaves[:2]]
            outputs = on_fragments(*mine, leaves[2], sharded, by_matrix)
            loss = (outputs * cotangent[index.clamp(min=0)])[real].sum()
            outputs = outputs.detach()[real] - values[0][0][index[real]]
        else:
            outputs = on_whole_rows(*leaves, *tokens_by_run(layouts))
            loss = (outputs * cotangent).sum()
            outputs = outputs.detach()
        gradients = torch.autograd.grad(loss, leaves)
        if cut:
            for each in gradients:
                dist.all_reduce(each)
        values.append((outputs, *gradients))
    size = max(float(each.abs().max()) for each in values[0])
    rest = [values[1][0], *(mine - theirs for mine, theirs in zip(values[1][1:], values[0][1:], strict=True))]
    return max(float(each.abs().max()) for each in rest if each.numel()) / size
