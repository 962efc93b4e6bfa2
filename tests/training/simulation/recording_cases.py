"""Work that tests record on the simulated device, and mistakes that they plant in a model."""

from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ropewalk.fused import fused
from ropewalk.models.compute import losses
from ropewalk.training.simulation import step as dry
from ropewalk.training.simulation.memory import memory_of
from ropewalk.training.simulation.recording import Recorder
from ropewalk.training.simulation.simulated import register_device
from tests.dry_run.cases import played


def recorded(work):
    """Record ``work(device)`` as if it were part of a step."""
    device = register_device()
    recorder = Recorder(device)
    with recorder.recording_of() as recording:
        recorder.phase = "start"
        work(device)
    return recording


def allocates_and_frees(device):
    x = torch.empty(256, 256, device=device)
    y = x * 2
    # A view occupies nothing.
    z = y[0].view(16, 16)
    del x
    torch.empty(10, device=device, dtype=torch.float64)
    assert z.shape == (16, 16)


def reads_and_writes(device):
    x, y = (torch.empty(64, 32, device=device) for _ in range(2))
    row = torch.empty(1, 32, device=device).expand(64, 32)
    x * row
    x.add_(y)
    x.copy_(y)
    x.fill_(1.0)
    torch._foreach_mul_([x, y], 2.0)
    # Views move nothing.
    x @ y.T.view(32, 64)[:]


@fused
def gated(x, weight):
    """Temporaries, a product with a temporary as its operand, and two outputs."""
    operand = (x.sigmoid() * x).exp()
    product = operand @ weight
    return product.tanh() * 2, x[0] + 1


def runs_fused(device):
    x = torch.empty(64, 32, device=device)
    gated(x, torch.empty(32, 16, device=device))


@fused
def many_values(x, weight):
    """Values that are gone soon, between products whose operands and results have memory."""
    for _ in range(20):
        x = ((x.sigmoid() * x).exp().tanh() @ weight).relu() + 1
    return x


def runs_the_same_twenty_times(device):
    x, weight = torch.empty(64, 32, device=device), torch.empty(32, 32, device=device)
    for _ in range(20):
        many_values(x, weight)


def resizes(device):
    storage = torch.empty(1000, device=device).untyped_storage()
    storage.resize_(0)
    storage.resize_(400)


def allocates_much(device):
    torch.empty(100_000, device=device)


def computes_on_the_host(device):
    lengths = torch.tensor([3, 4]).cumsum(0)
    assert lengths.tolist() == [3, 7]
    assert lengths.to(device).to("cpu").device.type == "cpu"


def reads_a_list(device):
    torch.ones(3, device=device).tolist()


READS = 20


def reads_one_after_another(device):
    """Each tensor may get the address of the one before it, which is gone."""
    for _ in range(READS):
        torch.ones(1, device=device).item()


class Planted(nn.Module):
    """A layer with a mistake before it."""

    def __init__(self, layer, mistake):
        super().__init__()
        self.layer, self.mistake = layer, mistake

    def forward(self, x):
        return self.layer(self.mistake(x))


def waits(recipe):
    """Places at which a dry step of the recipe waits for the device."""
    return set(played(recipe).recording.waits)


def waits_with(recipe, mistake):
    """The same, with a mistake planted before the MLP of the first layer."""
    made = dry._model

    def model(*arguments):
        trained = made(*arguments)
        layer = trained.model.model.layers[0]
        layer.mlp = Planted(layer.mlp, mistake)
        return trained

    with mock.patch.object(dry, "_model", model):
        return waits(recipe)


def reads(x):
    return x * x.detach().sum().item()


def adds_from_the_cpu(x):
    return x + torch.ones(x.shape[-1])


def multiplies_wrong_shapes(x):
    return x + x @ x.new_empty(3, 3)


def selects(x):
    return x + x[x > 0].mean()


def full_logits(recipe, plant):
    """Logits of all tokens in a dry step, whose loss is computed at once if ``plant`` is true."""

    def at_once(hidden, labels, head):
        return F.cross_entropy(head.logits(hidden), labels, reduction="none", ignore_index=-100)

    loss = at_once if plant else losses.chunked_token_losses
    with mock.patch.object(losses, "chunked_token_losses", loss):
        return memory_of(played(recipe)).full_logits


def operators_of(activation):
    """Operators that allocate for an activation function in the backward on the simulated device."""

    def work(device):
        x = torch.empty(8, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
        activation(x).backward(torch.empty(8, 8, device=device, dtype=torch.bfloat16))

    events = recorded(work).events
    return [each.allocation.operator for each in events if each.change > 0 and each.phase == "backward"]


def differentiates():
    """The type of the device of a gradient, and whether torch takes the device for an accelerator."""
    device = register_device()
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty(3, 3, device=device, requires_grad=True)
        (torch.empty(3, 3, device=device) @ weight).sum().backward()
    return weight.grad.device.type, torch.accelerator.is_available()


def casts(backward):
    """Dtypes under autocast: of products, of reductions, of others, and of a gradient."""
    device = register_device()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("simulated", torch.bfloat16):
        x = torch.empty(4, 4, device=device, requires_grad=backward)
        product = x @ x
        labels = torch.zeros(4, dtype=torch.int64, device=device)
        loss = F.cross_entropy(product, labels)
        if backward:
            loss.backward()
        reductions = (
            product.softmax(-1),
            product.log_softmax(-1),
            product.sum(),
            product.pow(2),
            product.exp(),
        )
        return (
            {product.dtype, F.linear(x, x).dtype},
            {loss.dtype, *(each.dtype for each in reductions)},
            {(product * 2).dtype, F.silu(product).dtype},
            x.grad.dtype if backward else None,
        )


def sent_and_executed(recipe, ranks, rank, passes):
    """A dry step that executes up to so many passes."""
    with mock.patch.object(dry, "MOST_PASSES", passes):
        return played(recipe, ranks, rank=rank)


class Gated(nn.Module):
    """A gated MLP of which every call is fused."""

    def __init__(self, device):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False, device=device, dtype=torch.bfloat16)
            for sizes in ((64, 256), (64, 256), (256, 64))
        )

    @fused
    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@fused
def normalised(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@fused
def rotated(q, cos, sin):
    half = q.shape[-1] // 2
    return (q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin).to(q.dtype)


def mlp(device):
    return Gated(device), (torch.empty(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True),)


def norm(device):
    x = torch.empty(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    return normalised, (x, torch.empty(64, device=device, dtype=torch.bfloat16, requires_grad=True))


def unused(device):
    """A norm whose output nothing keeps: a sum needs its shape alone."""
    function, inputs = norm(device)
    return lambda *given: function(*given).sum(), inputs


def rotation(device):
    leaf = torch.empty(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    # As a projection returns it: nothing else holds it.
    return rotated, (leaf * 1, *torch.empty(2, 32, 64, device=device))


def trained(work, checkpointed):
    """Changes of memory of a function's forward and backward, by operator, and the operations."""
    device = register_device()
    recorder = Recorder(device)
    with recorder.recording_of() as recording:
        recorder.phase = "forward"
        function, inputs = work(device)
        leaves = [each for each in inputs if each.is_leaf and each.requires_grad]
        start = len(recording.events)
        output = (
            checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
            if checkpointed
            else function(*inputs)
        )
        del inputs
        middle = len(recording.events)
        gradient = torch.empty_like(output)
        output.backward(gradient)
        changes = [event.change for event in recording.events]
        del leaves, gradient, function
    return changes[start:middle], changes[middle:], dict(recording.flops)
