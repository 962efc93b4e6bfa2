"""What ranks run in the tests of sharded training; spawned processes import it by name."""

import random
from unittest.mock import patch

import torch
import transformers

from ropewalk import PackedLayout, RopewalkError, Row
from ropewalk.attention.kept import Keeping
from ropewalk.attention.layout import IGNORED, next_token_labels
from ropewalk.evaluation.samples import LengthTooShort
from ropewalk.models.compute import losses
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.compute.tiled_mlp import tile_mlps
from ropewalk.models.load import checkpoint_activations, load_model
from ropewalk.models.sharding import gathered_state, load_sharded
from ropewalk.parallel import MeshShape, ShardedLayouts, joined, make_mesh
from ropewalk.parallel.traffic import counted_traffic
from ropewalk.testing import random_layout
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update import step
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import ForwardPass, micro_batches, train_step

VOCABULARY = 503


def save_tied_llama(folder, kv_heads=2):
    """A random Llama with tied embeddings and a vocabulary that no number of ranks divides."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def save_mixtral(folder):
    """A random Mixtral with three experts, which no number of ranks divides."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)


def packed_rows(count, length=61, seed=0):
    """Rows of one odd length, some with documents over all shards, some with a shard whose labels are all ignored."""
    rng, rows = random.Random(seed), []
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        if number % 4 == 1:
            layout = PackedLayout.from_lengths([1] * 30 + [length - 31], "anchor")
        else:
            layout = random_layout(length, rng, interleaved=number % 4 == 2)
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return rows


def trained(
    folder,
    rows,
    steps,
    rows_per_batch,
    precision,
    checkpointing,
    mesh=None,
    world=None,
    offload=False,
    tiles=None,
    optimizer_away=False,
):
    """(loss, gradient norm, tokens) of each step, and the weights after the last."""
    if mesh is None:
        whole = load_model(folder, dtype=torch.float32)
        model = LossModel(whole, OutputHead.of(whole))
        mine = rows
    else:
        compute = torch.bfloat16 if precision == "bfloat16" else None
        model = load_sharded(folder, mesh, world, compute_dtype=compute, offload=optimizer_away)
        mine = rows[mesh.data_rank :: mesh.shape.data_degree]
    masters = None
    if mesh is None and precision == "bfloat16":
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.to(torch.bfloat16)
    model.train()
    if checkpointing:
        checkpoint_activations(model.model, Keeping(0) if checkpointing == "attention kept" else None)
    if tiles is not None:
        tile_mlps(model.model, tiles)
    # The output head in as many tokens at a time, too.
    logits = losses.LOGITS_BYTES if tiles is None else 4 * tiles * model.head.linear.weight.shape[0]
    optimizer = MasterAdamW(model.named_parameters(), Optimizer(), masters, optimizer_away)
    found = []
    for _ in range(steps):
        batches = micro_batches(mine, rows_per_batch, mesh)
        with patch.object(losses, "LOGITS_BYTES", logits):
            r = train_step(model, batches, optimizer, 1e-2, ForwardPass(precision, offload), mesh)
        found.append((r.loss, r.grad_norm, r.trained_tokens, r.tokens, r.padding))
    state = (
        {n.removeprefix("model."): p.detach() for n, p in optimizer.masters.items()}
        if mesh is None
        else gathered_state(model.model, world)
    )
    # Tied: the embedding alone has a name, with a leading "model." of the decoder.
    return found, {name.removeprefix("model."): value.float() for name, value in state.items()}


def trained_on_ranks(
    shape,
    folder,
    rows,
    steps,
    rows_per_batch,
    precision,
    checkpointing,
    offload=False,
    tiles=None,
    optimizer_away=False,
):
    """The same on a mesh; weights on rank 0 only."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        options = (steps, rows_per_batch, precision, checkpointing)
        return trained(folder, rows, *options, mesh, world, offload, tiles, optimizer_away)


def trained_wrongly(fault, *args):
    """The same with a fault of the kind that other projects had."""
    take = ShardedLayouts.take

    def local_positions(self):
        return torch.arange(self.shard_length).expand(len(self.rows), -1).clone()

    def shifted_here(self, values, padding):
        if padding != IGNORED:
            return take(self, values, padding)
        # From the whole row's labels back to its tokens' successors, and cut at the shard's end.
        shard = take(self, values, padding)
        shard[:, -1] = IGNORED
        return shard

    def own_count(batches, mesh, device):
        """Each rank divides by its own number of targets."""
        return max(sum(batch.trained_tokens for batch in batches), 1)

    before = (ShardedLayouts.position_ids, ShardedLayouts.take, step._targets)
    try:
        if fault == "positions local to the shard":
            ShardedLayouts.position_ids = local_positions
        elif fault == "labels shifted after sharding":
            ShardedLayouts.take = shifted_here
        else:
            step._targets = own_count
        return trained_on_ranks(*args)
    finally:
        ShardedLayouts.position_ids, ShardedLayouts.take, step._targets = before


def step_traffic(shape, folder, rows, checkpointing, tiles=None):
    """The model's config, and what this rank sends in its second step: the first sets up."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        model = load_sharded(folder, mesh, world).train()
        if checkpointing:
            checkpoint_activations(model.model)
        if tiles is not None:
            tile_mlps(model.model, tiles)
        optimizer = MasterAdamW(model.named_parameters(), Optimizer())
        mine = rows[mesh.data_rank :: mesh.shape.data_degree]
        train_step(model, micro_batches(mine, 1, mesh), optimizer, 1e-2, mesh=mesh)
        with counted_traffic() as traffic:
            train_step(model, micro_batches(mine, 1, mesh), optimizer, 1e-2, mesh=mesh)
        return model.model.config.to_dict(), traffic


def too_short():
    """(kind, message) of an error whose constructor takes more than a message, on rank 1."""
    try:
        with joined("cpu") as world:
            if world.rank == 1:
                raise LengthTooShort("needle", 7, 9)
    except RopewalkError as error:
        return type(error).__name__, str(error)
    return None
