"""Case: the user's model, rows and settings, reduced so that they can be computed several times."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from ropewalk.attention import AttentionSpec
from ropewalk.attention.flash import describe_flash
from ropewalk.attention.kept import Keeping
from ropewalk.attention.layout import IGNORED, Row, next_token_labels
from ropewalk.data import (
    PackingSettings,
    SourceSpec,
    prepare_rows,
    read_documents,
)
from ropewalk.data.rows.packed_rows import PackedRows
from ropewalk.data.settings import LIMITS, PackConfig, WorkSettings
from ropewalk.data.tokens.tokenise import tokenise
from ropewalk.errors import RopewalkError, first_line
from ropewalk.io.lengths import counted
from ropewalk.models.checkpoint.loaded_weights import refuse_other_weights
from ropewalk.models.config.auto_class import auto_class, loads_decoder_alone
from ropewalk.models.config.read import read_config
from ropewalk.models.load import ModelSetup, attention_spec, empty_model, load_model, refuse_files
from ropewalk.parallel import Mesh, MeshShape, World
from ropewalk.rope import RopeMethod
from ropewalk.training.documents import named_rows
from ropewalk.training.preflight import resolve
from ropewalk.training.recipe.recipe import Optimizer, Recipe
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.stage_rope.base import Before
from ropewalk.training.stage_rope.decide import provisional_method

WORK = 6e8
"""Budget of parameters x tokens of all rows; a forward and backward in float64 takes about a second on a CPU core."""
BYTES_A_PARAMETER = 64
"""Both sides hold weights, gradients and the gradients of two steps in float64; one side holds them in float32 too."""
SHORTEST = 32
"""Smallest row length in tokens."""
LEAST_IN_BATCH = 2
"""Smallest number of rows in a micro-batch, if there are enough rows: a bug may affect only rows after the first."""
SPECIAL = 2
"""Tokens that packing may add to a document, beside a tag."""
DOCUMENTS_A_ROW = 3
"""Documents longer than a third of a row are truncated, so that rows contain document boundaries to verify."""


@dataclass(frozen=True, eq=False)
class Case:
    """Input of all checks; it is pickled and sent to the processes of a pool.

    Attributes:
        model: folder of the model, or of its first layers.
        setup: how the recipe's first stage runs the model: RoPE, context and engine.
        rows: packed rows of one length.
        trained: for each row, bool ``[length]``, False where a token must not be a target (tags and padding).
        num_heads: number of attention heads that all layers have in common, which limits the Ulysses degrees.
        attention: requirements of the layers on an engine, for the device of one process and the dtype of the
            precision.
        seed, optimizer, precision: settings of the recipe; ``auto`` is resolved.
        rows_per_batch: rows per forward pass: those of the stage, and at least 2.
        gradient_checkpointing, offload_activations, keeping, tiled_mlp, offload_optimizer: settings of the
            stage.
        compiled: whether the stage compiles pieces of the model.
        scratch: folder for files that the checks save.
        indexers: whether the model has indexers, so that ranks cannot share a row.
        key: unique key of this case, under which results that several checks need are cached.
    """

    model: str
    setup: ModelSetup
    rows: tuple[Row, ...]
    trained: tuple[Tensor, ...]
    num_heads: int
    attention: AttentionSpec
    seed: int
    optimizer: Optimizer
    precision: str
    rows_per_batch: int
    gradient_checkpointing: bool
    offload_activations: bool
    keeping: Keeping | None
    tiled_mlp: int | None
    offload_optimizer: bool
    compiled: bool
    scratch: str
    indexers: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.rows[0].layout.total_length

    @property
    def device(self) -> str:
        """Device of a single process."""
        return str(self.attention.device)

    @property
    def rope(self) -> RopeMethod:
        """RoPE method of the stage."""
        assert self.setup.rope is not None
        return self.setup.rope

    @property
    def context(self) -> int:
        """Context of the stage in tokens, which is also the config's max_position_embeddings."""
        assert self.setup.max_position_embeddings is not None
        return self.setup.max_position_embeddings

    def batches(self, mesh: Mesh) -> list[tuple[Row, ...]]:
        """This rank's rows in micro-batches, as in a run; the last one may have fewer rows."""
        rows = self.rows[mesh.data_rank :: mesh.shape.data_degree]
        size = self.rows_per_batch
        return [rows[start : start + size] for start in range(0, len(rows), size)]


def prepare(
    recipe: Recipe,
    scratch: Path,
    rows: int = 4,
    length: int | None = None,
    layers: int | None = None,
    world: World | None = None,
) -> tuple[Case, list[str], MeshShape]:
    """Build a case from the first stage of a recipe, a few of its rows, and its model or the model's first layers.

    Args:
        recipe: recipe of the user.
        scratch: folder for the copy of the model, the rows, and files that checks save.
        rows: number of rows.
        length: tokens per row; if None, the first stage's context, or less if a CPU needs more than about a minute.
        layers: number of first layers of the model to use; all if None.
        world: processes that the recipe runs on; this one alone if None.

    Returns:
        The case, remarks on differences from the recipe, and the recipe's mesh.

    Raises:
        RopewalkError: if a run of the recipe would be refused, or if the length or the number of layers is out of
            range.
    """
    # Only the first stage is verified, so later ones may need other processes.
    resolved = resolve(recipe, world, training=range(1))
    here = resolved.stages[0]
    stage, remarks = here.settings.stage, []
    config = read_config(resolved.model, recipe.trust_remote_code)
    there = len(config.layers)
    method = resolved.methods[0]
    if method is None:
        before = Before.first((resolved.rope, resolved.trained_length))
        # The run would measure and choose this RoPE first; the checks hold for any, so a provisional one stands in.
        method, remark = provisional_method(recipe, 0, before, resolved.tables[0])
        remarks.append(remark)
    model = resolved.model
    if layers is not None:
        model = _first_layers(resolved, recipe, layers, scratch)
        remarks.append(f"verified with only the {first_layers(layers)} of {there}")
    parameters = _parameters(model, recipe)
    _refuse_large(parameters, there, layers)
    # Load once now: unreadable weights should be one error here, not a failure of every check.
    setup = ModelSetup(
        method,
        stage.context,
        recipe.engine,
        recipe.exact_rope,
        recipe.trust_remote_code,
        tuple(recipe.lift),
        resolved.other_ropes[0],
    )
    load_model(model, replace(setup, engine="auto"))
    if stage.rows_per_batch > rows:
        remarks.append(
            f"verified with micro-batches of {rows} rows instead of the stage's {stage.rows_per_batch}"
        )
    tokens = _row_length(parameters, stage.context, length, rows)
    if tokens < stage.context:
        remarks.append(f"verified with rows of {tokens:,} tokens instead of the stage's {stage.context:,}")
    if (original := resolved.short_lengths[0]) is not None and tokens <= original:
        remarks.append(
            f"rows of {tokens:,} tokens are not longer than the original length of {original:,}, so all of them have "
            "the RoPE of the short rows; give a longer --length to verify both"
        )
    placed = _placed(resolved, rows, tokens, scratch)
    if resolved.device.type == "cuda":
        remarks.append(describe_flash(torch.cuda.get_device_capability(resolved.device)[0]))
    cut = [_shortened(packed[number], tokens) for packed, number in placed]
    heads = config.common_heads
    assert heads is not None
    dtype = torch.float32 if here.precision == "float32" else torch.bfloat16
    case = Case(
        model=model,
        setup=setup,
        rows=tuple(cut),
        trained=tuple(_trained(packed, number)[:tokens] for packed, number in placed),
        num_heads=heads,
        indexers=bool(config.indexed_layers),
        attention=attention_spec(config, str(resolved.device), dtype),
        seed=recipe.seed,
        optimizer=here.settings.optimizer,
        precision=here.precision,
        rows_per_batch=max(stage.rows_per_batch, LEAST_IN_BATCH),
        gradient_checkpointing=stage.gradient_checkpointing,
        offload_activations=stage.offload_activations,
        keeping=here.keeping,
        tiled_mlp=stage.tiled_mlp,
        offload_optimizer=stage.offload_optimizer,
        compiled=here.compiled,
        scratch=str(scratch),
    )
    return case, remarks, here.mesh


def first_layers(count: int) -> str:
    """Text such as ``first layer`` or ``first 2 layers``."""
    return "first layer" if count == 1 else f"first {count} layers"


def _refuse_large(parameters: int, there: int, layers: int | None) -> None:
    """Raise if float64 copies of the model exceed this machine's memory: the kernel would kill the process silently."""
    needed, memory = parameters * BYTES_A_PARAMETER, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        kept = there if layers is None else layers
        raise RopewalkError(
            f"verifying {parameters:,} parameters takes about {needed / 2**30:,.0f} GiB of memory in float64, but this "
            f"machine has {memory / 2**30:,.0f} GiB; verify fewer than {kept} of the model's layers with --layers"
        )


def _row_length(parameters: int, context: int, asked: int | None, rows: int) -> int:
    if asked is not None:
        if not SHORTEST <= asked <= context:
            raise RopewalkError(
                f"--length must be from {SHORTEST} to the stage's context of {context}, got {asked}"
            )
        return asked
    affordable = int(WORK / (parameters * rows))
    # Round down to a power of two, like most contexts; it stays divisible by the usual numbers of ranks.
    power: int = 1 << max(affordable, SHORTEST).bit_length() - 1
    return min(context, power)


def _parameters(model: str, recipe: Recipe) -> int:
    # On meta, so that counting the parameters allocates none of them.
    empty = empty_model(model, ModelSetup(trust_remote_code=recipe.trust_remote_code, exact_rope=False))
    return sum(parameter.numel() for parameter in empty.parameters())


def _first_layers(resolved: ResolvedRecipe, recipe: Recipe, layers: int, scratch: Path) -> str:
    """Save the first layers of a model, with embeddings and head, as a transformers folder and return its path."""
    config = read_config(resolved.model, recipe.trust_remote_code).source
    text = config.get_text_config()
    there = text.num_hidden_layers
    if not 1 <= layers <= there:
        raise RopewalkError(f"--layers must be from 1 to the model's {there} layers, got {layers}")
    for name, value in vars(text).items():
        # Layer types and other per-layer lists of the config must have one entry per remaining layer.
        if isinstance(value, list) and len(value) == there:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    folder = scratch / "first-layers"
    refuse_files(resolved.model)
    try:
        model, loading = auto_class(config).from_pretrained(
            resolved.model,
            config=config,
            dtype="auto",
            trust_remote_code=recipe.trust_remote_code,
            # As in load_model: without it, transformers would fall back to pickled weights.
            use_safetensors=True,
            output_loading_info=True,
        )
        model.save_pretrained(folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        raise RopewalkError(
            f"cannot take the {first_layers(layers)} of {resolved.model}: {reason}"
        ) from error
    # transformers would have saved what it initialised at random.
    refuse_other_weights(resolved.model, config, model, loading, loads_decoder_alone(config), layers)
    resolved.tokenizer.save_pretrained(folder)
    return str(folder)


def _placed(resolved: ResolvedRecipe, rows: int, tokens: int, scratch: Path) -> list[tuple[PackedRows, int]]:
    """Folder and number of each row; of a stage with short rows, every second one is short.

    Raises:
        RopewalkError: if the documents do not fill enough rows.
    """
    original = resolved.short_lengths[0]
    kinds = (False,) if original is None else (False, True)
    # Rows packed in advance have the stage's length and are cut later; new ones are packed at the short length.
    if resolved.stages[0].settings.data.rows:
        folders = [named_rows(resolved, 0, short=short) for short in kinds]
    else:
        # Documents are cut so that each row holds several: a row of one document could not show a leak between them.
        most = max(2, tokens // DOCUMENTS_A_ROW)
        settings = [each for each in resolved.packing[0] if each is not None]
        # Of a short row they are shorter still, and none is then long or short by itself.
        lengths = (most,) if original is None else (most, min(most, max(2, original - SPECIAL)))
        unlimited = {"context": tokens, **dict.fromkeys(LIMITS)}
        folders = [
            _pack(resolved, each.model_copy(update=unlimited), rows, scratch, length)
            for each, length in zip(settings, lengths, strict=True)
        ]
    placed = [(folders[number % len(kinds)], number // len(kinds)) for number in range(rows)]
    for packed, number in placed:
        if number >= len(packed):
            raise RopewalkError(
                f"the documents fill only {counted(len(packed), 'row')} of {tokens} tokens, but verify needs {rows} "
                "rows; lower either --length or --rows, or give more documents"
            )
    return placed


def _pack(
    resolved: ResolvedRecipe, settings: PackingSettings, rows: int, scratch: Path, most: int
) -> PackedRows:
    """Pack the first tokens of the recipe's first documents, at most ``most`` of each, with the run's settings."""
    file = scratch / f"documents-{settings.pattern}.jsonl"
    wanted = (rows + 1) * settings.context
    with file.open("w", encoding="utf-8") as lines:
        for ids, source in _documents(resolved):
            lines.write(json.dumps({"input_ids": ids[:most], "source": source}) + "\n")
            wanted -= len(ids[:most])
            if wanted <= 0:
                break
    config = PackConfig(
        sources=[SourceSpec(path=str(file))],
        tokenizer=resolved.tokenizer.name_or_path,
        rows=settings,
        # So few documents do not repay starting processes.
        work=WorkSettings(workers=1),
    )
    return prepare_rows(config, scratch / "rows", tokenizer=resolved.tokenizer)


def _documents(resolved: ResolvedRecipe) -> Iterator[tuple[list[int], str]]:
    # Small batches, because the caller stops after a few documents.
    texts = read_documents(resolved.stages[0].settings.data.sources)
    for document in tokenise(texts, resolved.tokenizer, batch_documents=16):
        # A document of one token has no target.
        if len(document.input_ids) > 1:
            yield document.input_ids.tolist(), document.source


def _trained(rows: PackedRows, number: int) -> Tensor:
    packed = rows.packed(number)
    trained = torch.ones(len(packed.input_ids), dtype=torch.bool)
    for start, stop in zip(packed.masked[::2], packed.masked[1::2], strict=True):
        trained[start:stop] = False
    return trained


def _shortened(row: Row, length: int) -> Row:
    """The first ``length`` tokens of a row, with the targets that are among them."""
    if length == row.layout.total_length:
        return row
    short = row.layout.first(length)
    ids = row.input_ids[:length].clone()
    labels = next_token_labels(ids, short)
    # Labels are recomputed, because the last token's target was cut off; tokens excluded from training stay excluded.
    return Row(ids, labels.where(row.labels[:length] == labels, torch.tensor(IGNORED)), short)


def with_labels(row: Row, keep: Sequence[int] | Tensor) -> Row:
    """The same row with targets only at the given indices."""
    labels = torch.full_like(row.labels, IGNORED)
    labels[keep] = row.labels[keep]
    return Row(row.input_ids, labels, row.layout)
