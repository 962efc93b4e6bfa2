"""What torch's compiler keeps of a function for the backward, on a CPU."""

import torch

from tests.training.simulation import recording_cases

BACKEND = "aot_eager_decomp_partition"
"""Decides as inductor does what is kept, and generates no code."""


def kept_of_mlp():
    """Bytes that a compiled MLP keeps besides its input and weights."""
    torch.compiler.reset()
    function = recording_cases.Gated("cpu")
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(function, backend=BACKEND)
    kept = Kept([x, *function.parameters()])
    with kept.hooks:
        compiled(x)
    return kept.bytes


class Kept:
    """Bytes of all storages that are saved for a backward, but for some tensors'."""

    def __init__(self, without):
        self.without = {each.untyped_storage()._cdata for each in without}
        self.saved = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.without:
            self.saved[storage._cdata] = storage
        return tensor

    @property
    def bytes(self):
        return sum(each.nbytes() for each in self.saved.values())
