"""A dry step does what the real one does: operations, bytes between ranks, and memory, measured on the CPU."""

import os
import subprocess
import sys

import pytest
import yaml

from ropewalk.training.simulation.memory import memory_of
from ropewalk.training.simulation.rank_costs import flops_of, operators_of, transfers_of
from tests.dry_run.cases import model_folder, played, recipe_of
from tests.places import ROOT
from tests.training.simulation.real_cases import real_step
from tests.training.simulation.recording_cases import sent_and_executed


def text_of(recipe):
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True))


def dense_of(step):
    return sum(count for (kind, _), count in step.recording.flops.items() if kind == "dense")


def sent_of(step):
    """Bytes by kind of collective, over all groups."""
    kinds = {}
    for (_, kind), (size, _) in step.recording.sent.items():
        kinds[kind] = kinds.get(kind, 0) + size
    return kinds


MESHES = [
    {"shard": 2},
    {"sequence": 2},
    {"ring": 2},
    {"replicate": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bytes_and_operations_are_those_of_two_processes(aside, tmp_path, two_ranks, mesh):
    model = model_folder(tmp_path / "model")
    recipe = recipe_of(model, parallel=mesh, rows_per_step=2, gradient_checkpointing=True, pattern="anchor")
    real = two_ranks.run(real_step, text_of(recipe), 2, 100)
    for rank, (sent, dense, _) in enumerate(real):
        step = aside(played, recipe, 2, "cpu", rank, document_length=100)
        assert sent_of(step) == sent
        assert dense_of(step) == dense


@pytest.mark.slow
def test_attention_counts_what_the_layout_makes_visible(aside, tmp_path):
    """512 tokens: an anchor of one token and documents of 100; the first one's run has the anchor in front."""
    recipe = recipe_of(model_folder(tmp_path / "model"), pattern="anchor")
    runs = [101] + [100] * 4 + [11]
    pairs = sum(length * (length + 1) // 2 for length in runs)
    forward, backward = (
        aside(played, recipe, 1, device, document_length=100).recording.flops["attention", moment]
        for device, moment in (("cuda", "forward"), ("cpu", "backward"))
    )
    # 2 layers of 8 heads, of 8 dimensions; two products forward and four backward, besides the scores once more.
    assert forward == 2 * 8 * pairs * 2 * 2 * 8
    assert backward == 2 * 8 * pairs * 4 * 2 * 8


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "sdpa"])
def test_hopper_computes_rows_of_one_run_by_cudnn(aside, tmp_path, engine):
    recipe = recipe_of(model_folder(tmp_path / "model"), pattern="full", engine=engine)
    recording = aside(played, recipe, document_length=100, capability=(9, 0)).recording
    assert {each.name for each in recording.operators if each.kind == "attention"} == {"cudnn"}
    pairs = 2 * 8 * (512 * 513 // 2)
    assert recording.flops["attention", "forward"] == pairs * 2 * 2 * 8
    # Sums of gradients of queries, one per query and head, and gradients of keys and values for each query head.
    scratch = {
        event.change for event in recording.events if event.allocation.operator.startswith("workspace")
    }
    assert max(scratch) == 512 * 8 * (8 + 1) * 4 + 2 * 512 * 8 * 8 * 2


@pytest.mark.slow
def test_the_pieces_of_one_run_in_a_ring_are_computed_by_cudnn(aside, tmp_path):
    """A rank has two of four pieces: each sees itself causally, and all keys before it."""
    recipe = recipe_of(model_folder(tmp_path / "model"), pattern="full", parallel={"ring": 2})
    found = [aside(played, recipe, 2, rank=rank, capability=(9, 0)).recording for rank in (0, 1)]
    for recording in found:
        assert {each.name for each in recording.operators if each.kind == "attention"} == {"cudnn"}
    pairs = 2 * 8 * (512 * 513 // 2)
    assert sum(each.flops["attention", "forward"] for each in found) == pairs * 2 * 2 * 8
    backward = sum(each.flops["attention", "backward"] for each in found)
    # Two products for each forward product; the scores once more are not counted here.
    assert backward == 2 * pairs * 2 * 2 * 8


@pytest.mark.slow
def test_slices_of_documents_count_as_they_are_computed(aside, tmp_path):
    """Runs of 101, four of 100 and 11 tokens are six slices of 256 for cuDNN; FlashAttention takes them as they are."""
    recipe = recipe_of(model_folder(tmp_path / "model"), pattern="anchor", engine="sdpa")
    lengths = {(9, 0): [256] * 6, (8, 0): [101] + [100] * 4 + [11]}
    for capability, runs in lengths.items():
        recording = aside(played, recipe, document_length=100, capability=capability).recording
        pairs = 2 * 8 * sum(length * (length + 1) // 2 for length in runs)
        assert recording.flops["attention", "forward"] == pairs * 2 * 2 * 8


@pytest.mark.slow
def test_passes_beyond_the_executed_ones_count_like_them(aside, tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model"), parallel={"shard": 2}, rows_per_step=8)
    short, whole = (aside(sent_and_executed, recipe, 2, 1, passes) for passes in (2, 4))
    assert (short.passes, len(short.started), len(whole.started)) == (4, 2, 4)
    assert flops_of(operators_of(short)) == _flops_of_all(whole)
    # The numbers of targets, and the loss and norm, are exchanged once a step.
    assert transfers_of(short).shards == _sent_by_all(whole)


def _flops_of_all(step):
    found = {"dense": 0, "attention": 0, "model": 0}
    for (kind, moment), count in step.recording.flops.items():
        found[kind] += count
        found["model"] += count * (moment != "recomputation")
    return found


def _sent_by_all(step):
    groups = [
        total for (group, _), total in step.recording.sent.items() if step.groups.get(group) != "replicate"
    ]
    return sum(size for size, _ in groups), sum(calls for _, calls in groups)


LARGE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "max_position_embeddings": 512,
}
"""Large enough that a step's tensors, of a hundred MB and more, outweigh what a process allocates besides."""

MEASURED = """
import sys
from tests.training.simulation.real_cases import real_step
from tests.training.simulation.recording_cases import sent_and_executed
print(real_step(open(sys.argv[1]).read(), 1, 220, False)[2])
"""


def measured_peak(recipe, folder):
    """Peak of a process that runs the real step, in a process of its own so that no other test's memory counts."""
    (folder / "recipe.yaml").write_text(text_of(recipe))
    environment = os.environ | {
        # The allocator returns what is freed, as the dry run counts it.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "OMP_NUM_THREADS": "1",
        # Matrix products of wider instructions hold 25 to 40 MB of their own, on CPUs that have them.
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    command = [sys.executable, "-c", MEASURED, str(folder / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of memory")
@pytest.mark.parametrize(
    ("layers", "changes"),
    # A CPU multiplies bfloat16 slowly.
    [(2, {"precision": "bfloat16", "context": 640}), (3, {"gradient_checkpointing": True, "context": 1024})],
    ids=["bfloat16", "checkpointing"],
)
def test_peak_memory_is_within_a_tenth_of_the_measured_one(aside, tmp_path, layers, changes):
    model = model_folder(tmp_path / "model", **LARGE, num_hidden_layers=layers)
    recipe = recipe_of(model, rows_per_step=1, **changes)
    planned = memory_of(aside(played, recipe, 1, "cpu", document_length=220)).peak
    assert planned == pytest.approx(measured_peak(recipe, tmp_path), rel=0.1)
