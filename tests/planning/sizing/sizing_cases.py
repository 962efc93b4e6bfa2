"""What ranks run in the tests of communication on paper; spawned processes import it by name."""

import torch
import torch.distributed as dist
import transformers
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ropewalk import PackedLayout
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape, ShardedLayouts, make_mesh, row_shards, sharded_attend
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.parallel.ring.traffic import ring_bytes as planned_ring_bytes
from ropewalk.parallel.traffic import counted_traffic
from ropewalk.planning.sizing.model_shape import Experts, Latent, ModelShape

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = ModelShape(80, 8192, 28672, 64, 8, 128, 128256)
MIXTRAL_8X7B = ModelShape(32, 4096, 14336, 32, 8, 128, 32000, experts=Experts(8, 2, 14336, 32))
QWEN3_30B_A3B = ModelShape(48, 2048, 6144, 32, 4, 128, 151936, experts=Experts(128, 8, 768, 48))
DEEPSEEK_V3 = ModelShape(
    *(61, 7168, 18432, 128, 128, 192, 129280),
    experts=Experts(256, 8, 2048, 58, shared=2048),
    latent=Latent(512, 64, 1536),
    value_dim=128,
)
LLAMA_4_SCOUT = ModelShape(
    48, 5120, 16384, 40, 8, 128, 202048, experts=Experts(16, 1, 8192, 48, shared=8192, every_token=True)
)

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 53,
}

SMALL_EXPERTS = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
"""Of a Mixtral; grouped products want widths that are multiples of 16 bytes."""


def counted_fsdp_bytes(tied, checkpointing):
    """Bytes that this rank sends in one forward and backward of a sharded Llama in bfloat16."""
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    ids = torch.arange(10)[None]
    with counted_traffic() as traffic:
        model(ids, labels=ids, use_cache=False).loss.backward()
    return traffic.total


def counted_ulysses_bytes(rows, length, value_dim):
    """Bytes that this rank sends in one layer's forward and backward; its shard length, too."""
    ranks = dist.get_world_size()
    mesh = make_mesh(MeshShape(sequence=ranks), "cpu")
    sharded = ShardedLayouts.of(
        [PackedLayout.from_lengths([length], "full", anchor_length=0)] * rows, mesh.groups
    )
    places, dim = sharded.shard_length, SMALL["head_dim"]
    heads, kv_heads = SMALL["num_attention_heads"], SMALL["num_key_value_heads"]
    q, k, v = (
        torch.randn(rows, n, places, width, requires_grad=True)
        for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    )
    with counted_traffic() as traffic:
        sharded_attend(q, k, v, sharded, "sdpa").sum().backward()
    return places, traffic.total


def saved_by_a_layer(places, experts=False):
    """Bytes a token that autograd keeps of one layer in bfloat16, its input and parameters left out."""
    kind = transformers.MixtralConfig if experts else transformers.LlamaConfig
    return saved_by_first_layer(kind(**(SMALL_EXPERTS if experts else SMALL)), places)


def saved_by_first_layer(config, places):
    """As above, of a model with this config."""
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).train().bfloat16()
    layer = model.model.layers[0]
    x = torch.randn(1, places, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    angles = model.model.rotary_emb(x, torch.arange(places)[None])
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *angles, *model.parameters())}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, position_embeddings=angles, attention_mask=None)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for where, size in storages.items() if where not in known) / places


MESHES = st.builds(
    MeshShape,
    replicate=st.integers(1, 3),
    shard=st.integers(1, 4),
    ring=st.integers(1, 4),
    sequence=st.sampled_from([1, 2, 4, 8]),
)


def sent_in_a_pass(layout, ring, balance="auto", checkpointing=True):
    """Bytes that the busiest ring rank sends by its plan: one layer of SMALL in bfloat16."""
    row = row_shards(layout, ring, 1, balance)
    sent = [
        planned_ring_bytes(ring_plan((layout,), (row,), rank), 2, 6, 6, torch.bfloat16)
        for rank in range(ring)
    ]
    return max((2 if checkpointing else 1) * forward + backward for forward, backward in sent)


ONE_LAYER = ModelShape.from_config(ModelConfig({**SMALL, "num_hidden_layers": 1}))
