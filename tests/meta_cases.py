"""What tests on the device ``meta`` share: kernels that are not aten's own look at no device there, so this does."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Raises where an operation, copies apart, gets tensors of two devices: a GPU's kernel would read host memory.

    Attributes:
        copied: copies from the CPU to the device so far.
    """

    def __init__(self):
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device for x in tensors if x.dim()}
        assert len(devices) < 2 or function is torch.ops.aten.copy_.default, (function, devices)
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.copied += (args[0].device.type, result.device.type) == ("cpu", "meta")
        return result
