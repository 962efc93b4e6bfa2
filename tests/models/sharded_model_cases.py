"""What ranks run in the tests of whole models on shards; spawned processes import it by name."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from ropewalk.models.load import AS_IT_IS, attach
from ropewalk.models.sharding import gathered_state, load_sharded
from ropewalk.models.softmax_scale import scaled_softmax
from ropewalk.parallel import MeshShape, ShardedLayouts, joined, make_mesh
from ropewalk.rope import LongRope, RotaryEmbedding

LONG = LongRope(8, 10000.0, (1.0,) * 4, (1.0, 1.5, 2.0, 4.0), 32, 128)
"""Takes its long factors for rows of more than 32 tokens."""


def tiny_llama(dtype, kv_heads=2, rope=None):
    config = transformers.LlamaConfig(
        vocab_size=503,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    attach(model)
    if rope is not None:
        model.model.rotary_emb = RotaryEmbedding(rope)
    return model.eval()


class SliceBySlice(torch.nn.Module):
    """A module that works on each token by itself, run as so many ranks run it: each its places, the last padded."""

    def __init__(self, module, degree):
        super().__init__()
        self.module, self.degree = module, degree

    def forward(self, x):
        size = -(-x.shape[1] // self.degree)
        padded = F.pad(x, (0, 0, 0, size * self.degree - x.shape[1]))
        # A rank's activations are a tensor of their own.
        parts = [self.module(part.contiguous()) for part in padded.split(size, dim=1)]
        return torch.cat(parts, dim=1)[:, : x.shape[1]]


def run_slice_by_slice(model, degree, kinds=("Linear", "LlamaMLP", "LlamaRMSNorm")):
    """Everything of a model but its attention product and its sums, slice by slice; a MLP as one."""

    def visit(parent):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in kinds:
                setattr(parent, name, SliceBySlice(child, degree))
            else:
                visit(child)

    visit(model)


def logits_on_shards(shape, dtype, batches, kv_heads=2, rope=None):
    """The logits of whole rows, put together from every rank's."""
    mesh = make_mesh(MeshShape(**shape), "cpu")
    model, found = tiny_llama(dtype, kv_heads, rope), []
    for ids, layouts in batches:
        sharded = ShardedLayouts.of(layouts, mesh.groups)
        with torch.no_grad():
            mine = model(sharded.take(list(ids), 0), layout=sharded).logits
        parts = [torch.empty_like(mine) for _ in range(mesh.shape.world_size)]
        dist.all_gather(parts, mine.contiguous())
        rows = zip(sharded.rows, *(part.transpose(1, 2) for part in parts), strict=True)
        found.append(torch.stack([row.join(shards) for row, *shards in rows]).transpose(1, 2))
    return found


def buffers_on_shards(folder, dtype, setup=AS_IT_IS):
    """A sharded model's buffers by name, when it is loaded in a dtype."""
    with joined("cpu") as world:
        model = load_sharded(folder, make_mesh(MeshShape(shard=2), "cpu"), world, setup, dtype)
        return {name: buffer.clone() for name, buffer in model.model.named_buffers()}


def dtypes_of_shards(folder, dtype):
    """Dtypes of a sharded model's parameters, when it is loaded in one."""
    with joined("cpu") as world:
        model = load_sharded(folder, make_mesh(MeshShape(shard=2), "cpu"), world, dtype=dtype)
        return {parameter.dtype for parameter in model.parameters()}


def head_on_shards(folder):
    """The whole output head of a sharded model, and what its config says of tied weights."""
    with joined("cpu") as world:
        model = load_sharded(folder, make_mesh(MeshShape(shard=2), "cpu"), world)
        return model.model.lm_head.weight.full_tensor().detach(), model.model.config.tie_word_embeddings


def folded_on_shards(folder, scale):
    """The weights of a sharded model with a softmax scale, and after it was taken back."""
    with joined("cpu") as world:
        model = load_sharded(folder, make_mesh(MeshShape(shard=2), "cpu"), world, AS_IT_IS, torch.float64)
        with scaled_softmax(model.model, scale):
            inside = gathered_state(model.model, world)
        return inside, gathered_state(model.model, world)
