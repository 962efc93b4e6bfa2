"""Eight processes over gloo against one: what they compute, what they send, how their work is balanced.

    python -m benchmarks.parallel_cpu [--length 1021] [--steps 2] [--repeats 3]

One step is eight packed rows of the embedded corpus through a small Llama, the same rows on every mesh. Beside each
figure stands its bound:

- logits: each side is within twice the error of one process against float64, and one rounding;
- attention, given the same q, k, v: 0 for the output of Ulysses; else the budget of
  ``ropewalk.testing.attention_errors`` and one process's own error;
- loss and gradient norm: what the tests grant gradients summed in another order, and for the norm also twice the error
  of torch's own float32 norm of the same gradients;
- bytes: the formulas of ``ropewalk.planning.sizing.traffic`` and ``ropewalk.parallel.ring.traffic``, which are exact.

Seconds are relative to one process on one thread in the same run, timed in turn with each mesh. Eight processes share
the machine's cores, so the figure says what parallelism costs in extra work, and nothing about scaling: with 2 cores
and no cost at all it would be 0.5.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.common import parsed, parser_of, settings_of, write
from ropewalk import PackedLayout, Row, attend
from ropewalk.attention.choices import Pattern
from ropewalk.attention.layout import next_token_labels
from ropewalk.attention.oracle import attention_errors, cotangent_of
from ropewalk.data.read.embedded import SOURCE_CODE, SOURCE_DOCS, demo_model_path, embedded_documents
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import load_model
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import Mesh, MeshShape, ShardedLayouts, joined, make_mesh, sharded_attend
from ropewalk.parallel.rank_pool import Ranks
from ropewalk.parallel.ring.balance import ring_chunks, ring_work
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.parallel.ring.traffic import ring_bytes
from ropewalk.parallel.traffic import counted_traffic
from ropewalk.parallel.ulysses import replicated_kv_heads
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.planning.sizing.traffic import fsdp_bytes, replica_bytes, ulysses_bytes
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import Batch, micro_batches, train_step

MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"ring": 2}, {"replicate": 2}),
    8: (
        {"sequence": 8},
        {"ring": 8},
        {"ring": 2, "sequence": 4},
        {"shard": 8},
        {"shard": 2, "ring": 2, "sequence": 2},
        {"replicate": 2, "shard": 4},
    ),
}
"""By number of ranks; a step has as many rows."""
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 4, 16, 1537
LOSS, NORM = 1e-6, 1e-5
"""Relative differences that tests/training/update/test_step_sharded.py grants to gradients summed in another order."""
FEW_SCALARS = 3 * 2 * 8
"""A step sums three numbers over all ranks beside what the formulas count: targets, loss, and norm."""
SOURCE_FILES = 160
"""Files of the standard library, of which the tokenizer does about a million tokens a core-second."""


def save_llama(folder: Path) -> None:
    """A random Llama with tied embeddings, fewer key/value heads than ranks, and a vocabulary that no mesh divides."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def documents() -> dict[str, list[list[int]]]:
    """Token ids of the embedded corpus by kind, in one random order: topics of Python's manual, and source files."""
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    texts: dict[str, list[str]] = {SOURCE_DOCS: [], SOURCE_CODE: []}
    for document in embedded_documents("all"):
        texts[document.source].append(document.text)
    found = {}
    for kind, each in texts.items():
        random.Random(0).shuffle(each)
        found[kind] = [
            e.ids for e in tokenizer.encode_batch_fast(each[:SOURCE_FILES], add_special_tokens=False)
        ]
    return found


def packed(texts: Sequence[list[int]], length: int, count: int, pattern: Pattern = "anchor") -> list[Row]:
    """Rows of consecutive documents behind a BOS, the last one cut; documents are used again where they run out."""
    rows: list[Row] = []
    at = 0
    for _ in range(count):
        ids, lengths = [0], list[int]()
        while len(ids) < length:
            part = texts[at % len(texts)][: length - len(ids)]
            ids, lengths, at = ids + part, [*lengths, len(part)], at + 1
        layout = PackedLayout.from_lengths(lengths, pattern, 1)
        row = torch.tensor(ids)
        rows.append(Row(row, next_token_labels(row, layout), layout))
    return rows


def logits_of(model: LossModel, rows: Sequence[Row], mesh: Mesh | None) -> list[Tensor]:
    """``[places, vocabulary]`` of each row's places on this rank, as the output head gives them."""
    found: list[Tensor] = []
    hook = model.head.linear.register_forward_hook(lambda module, args, output: found.append(output.detach()))
    with torch.no_grad():
        for row in rows:
            batch = Batch.of([row], mesh)
            model(batch.input_ids, batch.labels, batch.layouts)
    hook.remove()
    if mesh is not None:
        # What stays gathered was made without autograd: the root's gradients would be lost.
        model.reshard()  # type: ignore[operator]
    return found


def largest(x: Tensor) -> float:
    """The largest magnitude; NaN stays NaN."""
    return float(x.abs().max())


# One process.


def alone(folder: Path, rows: Sequence[Row], steps: int, out: Path) -> dict[str, Any]:
    """What one process computes, its logits in a file, and how far they are from float64."""
    model = whole_model(folder, torch.float32)
    logits = torch.stack(logits_of(model, rows, None))
    exact = logits_of(whole_model(folder, torch.float64), rows, None)
    error = max(largest(a.double() - b) for a, b in zip(logits, exact, strict=True))
    torch.save(logits, out)
    optimizer = ExactNorms(model.train().named_parameters(), Optimizer())
    batches = micro_batches(rows)
    results = [train_step(model, batches, optimizer, 1e-3) for _ in range(steps)]
    return {
        "logits_error": error,
        "logits_bound": 2 * (2 * error + torch.finfo(torch.float32).eps * largest(logits)),
        "largest_logit": largest(logits),
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "norm_error": max(optimizer.errors),
        "norm_bound": NORM + 2 * max(optimizer.errors),
    }


class ExactNorms(MasterAdamW):
    """Also keeps each gradient norm's relative error: the same float32 gradients, summed up in float64."""

    errors: tuple[float, ...] = ()

    def clip(self) -> Tensor:
        squares = [p.grad.double().square().sum() for p in self.masters.values() if p.grad is not None]
        exact = float(torch.stack(squares).sum().sqrt())
        norm = super().clip()
        self.errors += (abs(float(norm) / exact - 1),)
        return norm


def whole_model(folder: Path, dtype: torch.dtype) -> LossModel:
    model = load_model(folder, dtype=dtype)
    return LossModel(model, OutputHead.unchecked(model))


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def attention_case(row: Row) -> tuple[list[Tensor], Tensor]:
    """Random q, k, v ``[1, heads, length, head_dim]`` and the cotangent that attention_errors takes."""
    torch.manual_seed(1)
    length = row.layout.total_length
    qkv = [torch.randn(1, heads, length, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return qkv, cotangent_of(qkv[0], qkv[2])


def attention_bounds(row: Row) -> list[float]:
    """What ring and one process may differ by, in output and gradients: a budget, and one process's own error."""
    (q, k, v), _ = attention_case(row)
    errors = attention_errors(lambda q, k, v: attend(q, k, v, row.layout, "sdpa"), q, k, v, [row.layout])
    return [b + e for b, e in zip(errors.budgets, errors.engine, strict=True)]


# What every rank runs; spawned processes find it by this module's name.


def on_mesh(
    shape: dict[str, int], folder: Path, rows: list[Row], logits: Path, steps: int, repeats: int
) -> dict[str, Any]:
    """This rank's figures."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        model = load_sharded(folder, mesh, world)
        degree = mesh.shape.data_degree
        mine = rows[mesh.data_rank :: degree]
        expected = torch.load(logits, mmap=True)[mesh.data_rank :: degree]
        found = {"logits": _logits_difference(model, mine, mesh, expected), **_attention(rows[0], mesh)}

        optimizer = MasterAdamW(model.train().named_parameters(), Optimizer())
        batches = micro_batches(mine, 1, mesh)

        def step() -> Any:
            return train_step(model, batches, optimizer, 1e-3, mesh=mesh)

        results = [step()]
        with counted_traffic() as traffic:
            results += [step() for _ in range(steps - 1)]
        found["bytes"] = {kind: sent // (steps - 1) for kind, sent in traffic.bytes.items()}
        found["formula"] = formula(ModelShape.from_config(ModelConfig.of(model.model.config)), mesh, mine)
        before, seconds = _reset_peak(), []
        for _ in range(repeats):
            world.barrier()
            seconds.append(_timed(step))
        peak = None if before is None else _status("VmHWM") - before
        return {
            **found,
            "losses": [r.loss for r in results],
            "norms": [r.grad_norm for r in results],
            "padding": results[0].padding,
            "seconds": seconds,
            "peak_growth_mib": peak,
        }


def _logits_difference(model: LossModel, rows: list[Row], mesh: Mesh, expected: Tensor) -> float:
    """The largest difference of this rank's places from one process's ``[rows, length, vocabulary]``."""
    found = []
    for row, logits, whole in zip(rows, logits_of(model, rows, mesh), expected, strict=True):
        if mesh.shape.sequence_degree == 1:
            found.append(largest(logits - whole))
            continue
        groups = mesh.groups
        index = ShardedLayouts.of([row.layout], groups).rows[0].of(groups.ring_rank, groups.sequence_rank)
        found.append(largest(logits[index >= 0] - whole[index[index >= 0]]))
    return max(found)


def _attention(row: Row, mesh: Mesh) -> dict[str, list[float]]:
    """Differences of output and gradients from one process that is given the same q, k, v."""
    if mesh.shape.sequence_degree == 1:
        return {}
    qkv, cotangent = attention_case(row)
    sharded = ShardedLayouts.of([row.layout], mesh.groups)

    def shard(x: Tensor) -> Tensor:
        """``[1, H, T, D]`` to this rank's ``[1, H, s, D]``."""
        held = sharded.rows[0].take(x[0].transpose(1, 2), mesh.groups.ring_rank, mesh.groups.sequence_rank, 0)
        return held.transpose(1, 2)[None].contiguous()

    q, k, v = whole = [x.requires_grad_() for x in qkv]
    output = attend(q, k, v, row.layout, "sdpa")
    expected = [output, *torch.autograd.grad(output, whole, cotangent)]
    q, k, v = mine = [shard(x.detach()).requires_grad_() for x in qkv]
    own = sharded_attend(q, k, v, sharded, "sdpa")
    found = [own, *torch.autograd.grad(own, mine, shard(cotangent))]
    return {
        "attention": [largest(a.detach() - shard(b.detach())) for a, b in zip(found, expected, strict=True)]
    }


def formula(shape: ModelShape, mesh: Mesh, rows: Sequence[Row]) -> dict[str, int]:
    """Bytes that this rank sends in a step of one row a pass, by the kind of collective."""
    degrees, groups, width = mesh.shape, mesh.groups, torch.float32.itemsize
    exchanged = 0
    for row in rows:
        sharded = ShardedLayouts.of([row.layout], groups)
        exchanged += ulysses_bytes(shape, degrees.sequence, sharded.shard_length, width, checkpointing=False)
        if degrees.ring > 1:
            plan = ring_plan(sharded.layouts, sharded.rows, groups.ring_rank)
            heads = replicated_kv_heads(shape.kv_heads, degrees.sequence) // degrees.sequence
            exchanged += shape.layers * sum(
                ring_bytes(plan, heads, shape.head_dim, shape.head_dim, torch.float32)
            )
    return {
        "all_to_all": exchanged,
        "fsdp": len(rows) * fsdp_bytes(shape.units, degrees, width),
        "all_reduce": len(rows) * replica_bytes(shape.units, degrees),
    }


def _reset_peak() -> float | None:
    """Let Linux count this process's peak anew, and return what it holds now, MiB; None where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 1024


# Putting it together.


def compared(
    shape: dict[str, int], ranks: list[dict[str, Any]], one: dict[str, Any], bounds: list[float]
) -> dict[str, Any]:
    """The worst rank of each figure, beside its bound."""

    def relative(name: str) -> float:
        pairs = zip(ranks[0][name], one[name], strict=True)
        return max(float(abs(a - b) / abs(b)) for a, b in pairs)

    found: dict[str, Any] = {
        "mesh": str(MeshShape(**shape)),
        "logits": {"difference": max(r["logits"] for r in ranks), "bound": one["logits_bound"]},
        "loss": {"relative_difference": relative("losses"), "bound": LOSS},
        "grad_norm": {"relative_difference": relative("norms"), "bound": one["norm_bound"]},
    }
    if "attention" in ranks[0]:
        worst = [max(r["attention"][i] for r in ranks) for i in range(4)]
        # Sums over ranks that hold a copy of one key/value head are made in another order.
        allowed = bounds if shape.get("ring", 1) > 1 else [0.0, *bounds[1:]]
        names = ("output", "grad_q", "grad_k", "grad_v")
        found["attention"] = {
            name: {"difference": d, "bound": b} for name, d, b in zip(names, worst, allowed, strict=True)
        }
    found["bytes"] = _bytes(ranks)
    found["padding_places_a_row"] = ranks[0]["padding"] // len(ranks)
    grown = [r["peak_growth_mib"] for r in ranks]
    found["peak_growth_mib"] = None if None in grown else max(grown)
    return found


def _bytes(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Sent by the busiest rank in a step, and whether every rank sent what the formulas say."""

    def counted(rank: dict[str, Any]) -> dict[str, int]:
        sent = rank["bytes"]
        return {
            "all_to_all": sent.get("all_to_all", 0),
            "fsdp": sent.get("all_gather", 0) + sent.get("reduce_scatter", 0),
            "all_reduce": sent.get("all_reduce", 0),
        }

    busiest = max(ranks, key=lambda rank: sum(counted(rank).values()))
    exact = all(counted(r)[kind] == r["formula"][kind] for r in ranks for kind in ("all_to_all", "fsdp"))
    extra = max(counted(r)["all_reduce"] - r["formula"]["all_reduce"] for r in ranks)
    return {
        "counted": counted(busiest),
        "formula": busiest["formula"],
        "formula_holds_on_every_rank": exact and 0 <= extra <= FEW_SCALARS,
    }


def balances(texts: dict[str, list[list[int]]], length: int, ring: int) -> list[dict[str, Any]]:
    """Work of the busiest ring rank over the mean, for each cut; the bound is 1."""
    found = []
    for kind, each in texts.items():
        for pattern in ("full", "anchor"):
            layouts = [row.layout for row in packed(each, length, 4, pattern)]
            row: dict[str, Any] = {
                "documents": kind,
                "pattern": pattern,
                "row_length": length,
                "documents_a_row": statistics.mean(len(x.document_lengths) for x in layouts),
                "bound": 1.0,
            }
            for balance in ("contiguous", "zigzag", "cost", "auto"):
                work = [ring_work(layout, ring_chunks(layout, ring, balance)) for layout in layouts]
                shares = [max(w) / statistics.mean(w) for w in work]
                row[balance] = {"mean": statistics.mean(shares), "worst": max(shares)}
            found.append(row)
    return found


def within(mesh: dict[str, Any]) -> bool:
    """Whether every figure that has a bound is within it."""
    pairs = [
        (value.get("difference", value.get("relative_difference")), value["bound"])
        for value in (mesh["logits"], mesh["loss"], mesh["grad_norm"], *mesh.get("attention", {}).values())
    ]
    return all(value <= bound for value, bound in pairs) and mesh["bytes"]["formula_holds_on_every_rank"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=int, default=1021, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps that are compared, 2 or more")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed")
    parser.add_argument("--ranks", type=int, choices=list(MESHES), default=8)
    parser.add_argument(
        "--balance-length", type=int, default=131072, help="tokens of the rows whose cut is compared"
    )
    small = {"length": 131, "steps": 2, "repeats": 1, "ranks": 2, "balance_length": 2048}
    options = parsed(parser, small, arguments)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: the bytes of a step are counted from the second one on")
    torch.set_num_threads(1)
    texts = documents()
    rows = packed(texts[SOURCE_DOCS] or texts[SOURCE_CODE], options.length, options.ranks)
    meshes = []
    with tempfile.TemporaryDirectory() as scratch, Ranks(options.ranks) as ranks:
        folder, logits = Path(scratch) / "llama", Path(scratch) / "logits.pt"
        save_llama(folder)
        one, model = alone(folder, rows, options.steps, logits), whole_model(folder, torch.float32).train()
        optimizer, batches = MasterAdamW(model.named_parameters(), Optimizer()), micro_batches(rows)

        def step() -> None:
            train_step(model, batches, optimizer, 1e-3)

        step()
        bounds = attention_bounds(rows[0])
        for shape in MESHES[options.ranks]:
            reference = statistics.median([_timed(step) for _ in range(options.repeats)])
            found = ranks.run(on_mesh, shape, folder, rows, logits, options.steps, options.repeats)
            mesh = compared(shape, found, one, bounds)
            seconds = statistics.median(found[0]["seconds"])
            mesh["seconds"] = {"one_process": reference, "mesh": seconds, "ratio": seconds / reference}
            mesh["within_bounds"] = within(mesh)
            meshes.append(mesh)
            print(mesh, flush=True)
    result = {
        "settings": {
            **settings_of(options),
            "rows": options.ranks,
            "documents_a_row": statistics.mean(len(row.layout.document_lengths) for row in rows),
            "transformers": transformers.__version__,
        },
        "one_process": one,
        "meshes": meshes,
        "ring_balance": balances(
            {k: v for k, v in texts.items() if v}, options.balance_length, options.ranks
        ),
    }
    write("parallel_cpu", result, options)
    return 0 if all(mesh["within_bounds"] for mesh in meshes) else 1


if __name__ == "__main__":
    sys.exit(main())
