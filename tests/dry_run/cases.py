"""A tiny model without weights, recipes for it, and dry steps of them."""

import json
from dataclasses import replace

import torch
import yaml

from ropewalk.dry_run.run import PlannedRun, PlannedStage, StageTime, Wait
from ropewalk.parallel import World
from ropewalk.parallel.context import RunContext
from ropewalk.training.preflight import Machine, resolve
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.simulation.assumed_documents import documents_of
from ropewalk.training.simulation.memory import MOMENTS, PARTS, Memory, Tensor
from ropewalk.training.simulation.simulated import register_device
from ropewalk.training.simulation.step import DryStep, dry_step

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def model_folder(path, **changes):
    """A folder with a config and nothing else."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(TINY | changes))
    return path


def recipe_of(model, output="run", parallel=None, engine="auto", **stage):
    """A recipe of one stage of 512 tokens."""
    values = {
        "context": 512,
        "steps": 10,
        "rows_per_step": 1,
        "learning_rate": 1e-5,
        "rope": {"method": "ntk"},
        # auto plays further steps.
        "keep_attention": False,
    } | stage
    recipe = {
        "model": str(model),
        "output": str(output),
        "engine": engine,
        "data": {"sources": [{"path": "embedded"}]},
        "stages": [values],
    }
    if parallel is not None:
        recipe["parallel"] = parallel
    return parse_recipe(yaml.safe_dump(recipe), "recipe.yaml")


def resolved_for(recipe, ranks=1, device="cuda", capability=None):
    """The recipe on a machine of one node."""
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    machine = Machine(on, 80 * 10**9, capability)
    return resolve(recipe, World(0, ranks, 0, ranks), machine=machine)


def played(recipe, ranks=1, device="cuda", rank=0, document_length=None, capability=None) -> DryStep:
    """A dry step of a recipe's first stage."""
    resolved = resolved_for(recipe, ranks, device, capability)
    packed = documents_of(recipe, 0, document_length or 10**9, RunContext()).packed(recipe.stages[0])
    rows = packed.rows(packed.most_documents())
    on = register_device(capability) if device == "cuda" else torch.device("cpu")
    return dry_step(resolved, 0, resolved.methods[0], rows, on, rank)


KINDS = {"matmul": 5.0, "attention": 2.0, "other": 1.0}
"""Seconds of a step's operators."""


def planned_run(**changes) -> PlannedRun:
    """A plan of one stage, made by hand."""
    held = dict.fromkeys(PARTS, 0) | {"parameters": 4 * 10**9, "activations": 60 * 10**9}
    memory = Memory(
        peak=64 * 10**9,
        moment="backward",
        parts=held,
        moments={name: {"total": 64 * 10**9, **held} for name in MOMENTS},
        largest=(Tensor("activations", 10**9, (1, 1024, 512), "bfloat16", "aten.mm", "model.py:3 forward"),),
        full_logits=(),
        host={},
        course=(held, held, held),
        course_moments=("forward", "backward", "update"),
    )
    stage = PlannedStage(
        number=1,
        context=131072,
        steps=100,
        rows_per_step=8,
        mesh="8 sequence",
        device="cuda",
        engine="varlen",
        precision="bfloat16",
        kernels=("flash2",),
        recurrent="",
        documents="documents of 4,096 tokens",
        memory=memory,
        rank=0,
        usable=72 * 10**9,
        host=0,
        host_usable=1800 * 10**9,
        fits=True,
        changes=(),
        spare=(),
        finer=None,
        attention="",
        flops={"dense": 3 * 10**15, "attention": 10**15},
        model_flops=3 * 10**15,
        sent={"shards": 10**9, "replicas": 0, "ulysses": 2 * 10**9, "ring": 0},
        offloaded=0,
        waits=(Wait("ropewalk/training/update/step.py:1 _read", "update", 2),),
        copies=(),
        time=StageTime(10.0, 8.0, KINDS, 1.5, 0.5, 104857.6, 0.4, 0.11, 0.28, None),
    )
    run = PlannedRun("model", 8, "h100", 80 * 10**9, (stage,), ("an assumption",))
    return replace(run, stages=(replace(stage, **changes),))
