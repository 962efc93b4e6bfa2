"""What ranks run in the tests of collectives, of traffic and of meshes; spawned processes import it by name."""

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from ropewalk.parallel import MeshShape, make_mesh
from ropewalk.parallel.collectives import all_to_all
from ropewalk.parallel.mesh import forget_groups
from ropewalk.parallel.traffic import counted_traffic


def exchanged_parts():
    """What part p of this rank's tensor became, back from where it went, and the gradient of a weighted sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = (10.0 * rank + torch.arange(size)).requires_grad_()
    received = all_to_all(x, dist.group.WORLD)
    (gradient,) = torch.autograd.grad((received * (rank + 1)).sum(), x)
    return received.tolist(), all_to_all(received, dist.group.WORLD).tolist(), gradient.tolist()


def exchanged_unequal_parts():
    """What rank r gets if each sends it r entries, and the gradient of a sum weighted by who received."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = list(range(size))
    x = (10.0 * rank + torch.arange(sum(sent))).requires_grad_()
    received = all_to_all(x[:, None], dist.group.WORLD, sent, [rank] * size)
    (gradient,) = torch.autograd.grad((received * (rank + 1)).sum(), x)
    return received.flatten().tolist(), gradient.tolist()


def counted_collectives():
    """Every kind of collective once, as counted here and by torch's own counter, which knows their number."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4 * size)
    with counted_traffic() as traffic, CommDebugMode() as theirs:
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.all_gather_into_tensor(torch.empty(size * len(x)), x)
        dist.reduce_scatter_tensor(torch.empty(4), x)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
    with counted_traffic() as uneven:
        splits = [1, 3] if rank == 0 else [2, 2]
        received = [1, 2] if rank == 0 else [3, 2]
        dist.all_to_all_single(torch.empty(sum(received), 5), torch.ones(4, 5), received, splits)
    dist.all_reduce(x)
    return traffic.bytes, traffic.calls, theirs.get_total_counts(), uneven.bytes, traffic.total


def groups_of(shape):
    """Ranks of this one's groups, whether a second mesh of the shape shares them, and what this rank reads."""
    mesh, again = make_mesh(MeshShape(**shape), "cpu"), make_mesh(MeshShape(**shape), "cpu")
    groups = mesh.groups
    shared = (
        groups.ring_group is again.groups.ring_group
        and groups.sequence_group is again.groups.sequence_group
        and groups.row_group is again.groups.row_group
        and mesh.device_mesh is again.device_mesh
    )
    ranks = [
        None if group is None else dist.get_process_group_ranks(group)
        for group in (groups.ring_group, groups.sequence_group, groups.row_group)
    ]
    place = (groups.ring_rank, groups.sequence_rank, groups.rank)
    return ranks, place, mesh.data_rank, tuple(mesh.device_mesh.shape), shared


def mesh_of_another_size(shape):
    try:
        make_mesh(MeshShape(**shape), "cpu")
    except ValueError as error:
        return str(error)
    return ""


def forgotten_groups():
    """Whether a mesh that is made after the groups were forgotten has groups of its own."""
    shape = MeshShape(sequence=2)
    before = make_mesh(shape, "cpu").groups.sequence_group
    forget_groups()
    return make_mesh(shape, "cpu").groups.sequence_group is before
