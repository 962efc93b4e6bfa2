"""Memory and time that a stage needs on a rank, from a dry run of its step that is remembered in the user's cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ropewalk.attention.api import KERNELS
from ropewalk.attention.engines.capabilities import LEAST_CAPABILITY
from ropewalk.attention.kept import Keeping
from ropewalk.io.files import cache_folder, parse_json, write_json
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.read import read_config
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.model_shape import STATE_BYTES
from ropewalk.planning.sizing.time import H100, Cluster, Transfers, waiting_seconds
from ropewalk.training.recipe.recipe import Stage
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.simulation.assumed_documents import Documents
from ropewalk.training.simulation.rank_costs import in_own_process
from ropewalk.training.simulation.roofline import compute_seconds
from ropewalk.versions import software_versions

USABLE = 0.9
"""Share of a device's memory that a step may fill. The rest is for the CUDA context, NCCL and fragmentation."""
AMPLE = 100
"""A step takes less than this many times its least memory, beside ``LOGITS`` and ``SCORE_BYTES``.

Measured are 1.4 and 3.4 for two large shapes with checkpointing, and 16 to 76 for tiny models of ten families without
it. A judgement, not a bound that is proven.
"""
LOGITS = 2**31
"""More bytes than the logits of a chunk, their gradients and copies take."""
SCORE_BYTES = 16
"""More than each pair of a query and a key takes in a layer whose engine makes all scores at once."""
HEAD_MULTIPLE = 64
"""Kernels pad the dimensions of a head to a multiple of this number at most."""
LSE_BYTES = 8
"""No less bytes than the log-sum-exp of a head takes for a token."""
NO_TRANSFERS = Transfers((0, 0), (0, 0), (0, 0), (0, 0), 0)
ONE_DOCUMENT = Documents("one document per row")
"""The documents that most memory is needed for: rows that are packed with several attend to less."""


@dataclass(frozen=True)
class Need:
    """What a step takes on a rank.

    Attributes:
        device: most bytes on the device at any time.
        host: bytes of CPU memory.
        compute: seconds of its operators on an H100.
        transfers: bytes and number of its transfers.
    """

    device: int
    host: int
    compute: float = 0.0
    transfers: Transfers = NO_TRANSFERS

    def fits(self, bytes_per_rank: int) -> bool:
        """Whether a device of so many bytes has room."""
        return self.device <= USABLE * bytes_per_rank

    def seconds(self, mesh: MeshShape, cluster: Cluster) -> float:
        """Time of a step with the links of a cluster."""
        return self.compute + sum(waiting_seconds(self.transfers, mesh, self.compute, cluster))


@dataclass(frozen=True)
class Bounds:
    """What a step takes, as far as it can be said without a dry run.

    Attributes:
        least: less bytes than it takes on the device.
        most: more than it takes there; None if the model's parameters are not known.
        host: less bytes of CPU memory than it takes.
    """

    least: int
    most: int | None
    host: int

    def decides(self, bytes_per_rank: int) -> bool | None:
        """Whether a device of so many bytes has room; None if only a dry run can say it."""
        usable = USABLE * bytes_per_rank
        if self.least > usable:
            return False
        return True if self.most is not None and self.most <= usable else None


def bounds(
    config: ModelConfig,
    parameters: int | None,
    stage: Stage,
    mesh: MeshShape,
    precision: str,
    trained: int | None,
    on_gpu: bool,
) -> Bounds:
    """Bounds of what a step takes, from parameters, gradients and moments, and the input of each layer.

    Args:
        config: config of the model.
        parameters: number of its parameters; None if it is not known.
        stage: the stage.
        mesh: degrees of parallelism.
        precision: resolved precision of the stage.
        trained: number of parameters that an adapter trains, while those of the model are frozen; None if all are.
        on_gpu: whether there is CPU memory beside that of the device.
    """
    of_model, layers = parameters or 0, len(config.layers)
    # Under autocast, parameters are gathered in float32, and the hidden states between layers are float32.
    width = 2 if precision == "bfloat16" else 4
    states = STATE_BYTES * (of_model if trained is None else trained) // mesh.shard_degree
    frozen = 0 if trained is None else width * of_model // mesh.shard_degree
    tokens = stage.rows_per_batch * -(-stage.context // mesh.sequence_degree)
    inputs = layers * tokens * (config.values.get("hidden_size") or 0) * width
    whole = frozen + states + inputs
    host = on_gpu * (stage.offload_optimizer * states + stage.offload_activations * inputs)
    scores = SCORE_BYTES * layers * max(1, *config.heads_of_layers) * tokens * stage.context
    return Bounds(whole - host, None if parameters is None else AMPLE * whole + LOGITS + scores, host)


def most_kept(config: ModelConfig, stage: Stage, mesh: MeshShape, precision: str) -> int:
    """No less bytes than the results of attention of all layers, by which keeping them raises what a step takes.

    A result has an output in the compute dtype, whose heads kernels pad, and a log-sum-exp in float32 or wider.

    Args:
        config: config of the model.
        stage: the stage.
        mesh: degrees of parallelism.
        precision: resolved precision of the stage.
    """
    # A ring cuts rows into two parts a rank, each of which may have a token of padding.
    tokens = stage.rows_per_batch * (-(-stage.context // mesh.sequence_degree) + 2)
    width = 4 if precision == "float32" else 2
    widest = max(max(layer.key_dim, layer.value_dim) for layer in config.layers)
    dims = HEAD_MULTIPLE * -(-widest // HEAD_MULTIPLE)
    heads = max(1, *config.heads_of_layers)
    return len(config.layers) * tokens * heads * (dims * width + LSE_BYTES)


def may_keep(resolved: ResolvedRecipe, number: int) -> bool:
    """Whether ``keep_attention: auto`` keeps all results of attention of a stage on its GPU if there is room."""
    here = resolved.stages[number]
    stage = here.settings.stage
    asked = stage.keep_attention == "auto" and stage.gradient_checkpointing
    return asked and resolved.device.type == "cuda" and here.engine in KERNELS


def keeping_all(resolved: ResolvedRecipe, number: int) -> ResolvedRecipe:
    """The recipe with a stage whose checkpointed layers keep all results of attention on their GPU."""
    kept = [each.keeping for each in resolved.stages]
    kept[number] = Keeping(0, on_device=True)
    return resolved.keeps(kept)


def played_need(resolved: ResolvedRecipe, number: int) -> Need:
    """What a step of a stage takes on rank 0 of its mesh, played once and then read from the user's cache.

    In the zigzag layout, rank 0 receives the most keys of a ring.

    Args:
        resolved: the recipe, for the device to play on.
        number: index of the stage, from 0.

    Raises:
        EngineError: if the model does something that a dry run cannot follow, or that would fail on a GPU.
    """
    if resolved.adapter is not None and resolved.adapter.settings.quantize is not None:
        # A dry run cannot quantize weights. Counted with 2 bytes each, they take more than they will.
        plain = resolved.adapter.settings.model_copy(update={"quantize": None})
        resolved = replace(resolved, adapter=replace(resolved.adapter, settings=plain))
    if resolved.recipe.trust_remote_code:
        # Code from the Hub may change while its config does not.
        return _played(resolved, number)
    text = json.dumps(_decisive(resolved, number), sort_keys=True, default=str)
    file = cache_folder("dry-runs") / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    # What is damaged is played again, and a home that cannot be written to costs time alone.
    with suppress(OSError, ValueError, TypeError, KeyError):
        return _need_of(parse_json(file.read_text(encoding="utf-8")))
    need = _played(resolved, number)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(need))
    return need


def _played(resolved: ResolvedRecipe, number: int) -> Need:
    # A tokenizer is large, and no step needs it.
    resolved = replace(resolved, tokenizer=None)
    documents = replace(ONE_DOCUMENT, short_length=resolved.short_lengths[number])
    with in_own_process() as player:
        costs = player(resolved, number, documents, 0)
    seconds = sum(compute_seconds(costs.operators, H100).values())
    return Need(costs.memory.peak, costs.memory.host_bytes, seconds, costs.transfers)


def _need_of(values: Mapping[str, Any]) -> Need:
    sent = values["transfers"]
    shards, replicas, ulysses, ring = (
        (int(sent[name][0]), int(sent[name][1])) for name in ("shards", "replicas", "ulysses", "ring")
    )
    transfers = Transfers(shards, replicas, ulysses, ring, sent["host"])
    return Need(values["device"], values["host"], values["compute"], transfers)


_ELSEWHERE = (
    # Entries of their own, as the stage resolves them.
    "precision",
    "parallel",
    "optimizer",
    "rope",
    "router_aux_loss",
    # No tensor's size depends on these.
    "steps",
    "learning_rate",
    "warmup_steps",
    "schedule",
    "min_learning_rate",
    "decay_steps",
    "moments",
    "data",
    "seed",
)
"""Settings of a stage that the key of a dry run does not hold as they are written."""


def _decisive(resolved: ResolvedRecipe, number: int) -> dict[str, Any]:
    """Everything that a dry run of a stage depends on."""
    recipe, here = resolved.recipe, resolved.stages[number]
    config = dict(read_config(resolved.model).values)
    # The folder that it was read from.
    config.pop("_name_or_path", None)
    return {
        "versions": software_versions(),
        "config": config,
        "recipe": recipe.model_dump(mode="json", include={"exact_rope", "lift", "adapter"}),
        "asynchronous": recipe.checkpoints.asynchronous,
        "stage": here.settings.stage.model_dump(mode="json", exclude=set(_ELSEWHERE)),
        "optimizer": here.settings.optimizer.model_dump(mode="json"),
        "resolved": (here.precision, here.engine, repr(here.mesh), here.compiled, repr(here.keeping)),
        "rope": repr((resolved.methods[number] or resolved.rope, resolved.other_ropes[number])),
        "aux_loss": resolved.router_aux_losses[number],
        "device": (resolved.device.type, resolved.capability or LEAST_CAPABILITY),
        "missing": resolved.missing,
    }
