"""Runs that train an adapter: what they change, resume, several processes, precisions, and both exports."""

import json
import random
import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ropewalk import RopewalkError, load_model
from ropewalk.data import load_tokenizer
from ropewalk.parallel import World
from ropewalk.training import preflight
from ropewalk.training import stage as stage_module
from ropewalk.training.preflight import resolve
from tests.training.resume_cases import recipe_of
from tests.training.run_cases import extend, extended
from tests.training.tiny import save_tiny

RANK, ALPHA = 4, 8.0
UNIT = torch.finfo(torch.float32).eps / 2


def values_of(model, documents, output, **changed):
    """A recipe of two stages, as plain values; the second has another RoPE and computes layers again."""
    stage = {"rows_per_step": 2, "learning_rate": 1e-2}
    return {
        "model": str(model),
        "output": str(output),
        "data": {"sources": [str(documents)], "validation_documents": 20},
        "stages": [
            {"context": 64, "steps": 3, **stage},
            {"context": 128, "steps": 3, "gradient_checkpointing": True, **stage},
        ],
        "adapter": {"rank": RANK, "alpha": ALPHA},
        "checkpoints": {"every": 2, "keep": 10},
        "evaluation": {"suites": ["perplexity"], "rows": 2},
        **changed,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_checkpoint, tiny_documents):
    """A finished run, and its recipe; its embeddings are tied."""
    values = values_of(tiny_checkpoint, tiny_documents, tmp_path_factory.mktemp("adapter") / "run")
    return values, extend(recipe_of(values))


def bytes_of(output):
    names = ("model/model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
    return [(Path(output) / name).read_bytes() for name in names]


def losses_of(output):
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [(line["stage"], line["step"], line["loss"], line["grad_norm"]) for line in lines]


def plain(folder, config=None, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()


def test_the_merged_model_is_the_base_with_the_adapter_within_rounding(run, tiny_checkpoint):
    values, summary = run
    folder = Path(values["output"]) / "adapter"
    assert summary["adapter"] == str(folder)
    base = plain(tiny_checkpoint, AutoConfig.from_pretrained(folder))
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 for an attribute under its old name.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).double()
    merged = plain(summary["model"])
    ids = torch.randint(0, 16, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = merged(ids).logits, adapted(ids).logits
    # Both compute in float64, so they differ by the rounding of the merged weights to float32 alone.
    assert (found - expected).abs().max() < 100 * UNIT * expected.abs().max()
    exact = {name: value.clone() for name, value in adapted.merge_and_unload().state_dict().items()}
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, value in merged.state_dict().items():
        pair = [
            tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{each}.weight")
            for each in "AB"
        ]
        bound = UNIT * exact[name].abs()
        if pair[0] is not None:
            a, b = (each.double().abs() for each in pair)
            # A sum of products of rank 4, its factor, the addition: each operation rounds once.
            bound = bound + (RANK + 2) * UNIT * (ALPHA / RANK) * (b @ a)
        assert ((value - exact[name]).abs() <= 1.01 * bound).all(), name


def test_what_the_adapter_does_not_train_is_bitwise_unchanged(run, tiny_checkpoint):
    _, summary = run
    before = load_file(tiny_checkpoint / "model.safetensors")
    after = load_file(Path(summary["model"]) / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        trained = "self_attn" in name or "norm" in name or "embed" in name
        assert torch.equal(value, after[name]) != trained, name


def test_the_exported_configs_have_the_extended_rope(run, tiny_checkpoint):
    values, summary = run
    for folder in (Path(summary["model"]), Path(values["output"]) / "adapter"):
        config = json.loads((folder / "config.json").read_text())
        assert config["max_position_embeddings"] == 128
        assert config["rope_parameters"]["rope_theta"] == summary["stages"][1]["rope_theta"]
        assert config["dtype"] == "float32"
    readme = (Path(values["output"]) / "adapter" / "README.md").read_text()
    program = readme.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exec(program, names)
    ids = torch.arange(100)[None] % 16
    with torch.no_grad():
        found = names["model"].eval()(ids).logits
        torch.testing.assert_close(found, plain(summary["model"], dtype=None)(ids).logits, rtol=0, atol=2e-6)


def test_checkpoints_hold_what_is_trained_and_its_optimizer_state_alone(run, tiny_checkpoint):
    values, _ = run
    resolved = resolve(recipe_of(values))
    assert resolved.adapter is not None
    # Tied, so the file has the embedding twice.
    embedding = 16 * 16
    for folder in (Path(values["output"]) / "checkpoints").iterdir():
        weights = load_file(folder / "adapter_model.safetensors")
        assert sum(each.numel() for each in weights.values()) == resolved.adapter.trained + embedding
        state = load_file(folder / "training_state.safetensors")
        moments = [each for name, each in state.items() if name.startswith("exp_avg")]
        assert sum(each.numel() for each in moments) == 2 * resolved.adapter.trained
        assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    "precision",
    # Autocast has the weights and masters of float32.
    ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)],
)
def test_a_run_stopped_at_random_steps_gives_the_same_bytes(
    run, tiny_checkpoint, tiny_documents, tmp_path, monkeypatch, precision
):
    values, _ = run
    if precision != "float32":
        straight = values_of(tiny_checkpoint, tiny_documents, tmp_path / "straight", precision=precision)
        extend(recipe_of(straight))
        values = straight
    again = {**values, "output": str(tmp_path / "stopped")}
    step, stops = stage_module.train_step, sorted(random.Random(0).sample(range(1, 9), 3))
    count = 0

    def stopping(*arguments):
        nonlocal count
        count += 1
        if count in stops:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(stage_module, "train_step", stopping)
    resume = False
    while True:
        try:
            extend(recipe_of(again), resume=resume)
            break
        except KeyboardInterrupt:
            resume = True
    assert count > 6
    assert losses_of(again["output"]) == losses_of(values["output"])
    assert bytes_of(again["output"]) == bytes_of(values["output"])


def test_a_frozen_base_in_bfloat16_trains_float32_masters(tiny_checkpoint, tiny_documents, tmp_path):
    values = values_of(tiny_checkpoint, tiny_documents, tmp_path / "run", precision="bfloat16")
    extend(recipe_of(values))
    weights = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    for name, each in weights.items():
        assert each.dtype == torch.float32
        # Not all values would survive a rounding to bfloat16, which those of a model's own weights would be.
        assert not torch.equal(each, each.bfloat16().float()), name


def test_gradient_checkpointing_changes_no_step(run, tiny_checkpoint, tiny_documents, tmp_path):
    values, _ = run
    stages = [
        {**stage, "gradient_checkpointing": not number} for number, stage in enumerate(values["stages"])
    ]
    other = {**values, "output": str(tmp_path / "run"), "stages": stages}
    extend(recipe_of(other))
    assert losses_of(other["output"]) == losses_of(values["output"])


@pytest.mark.slow
def test_evaluation_during_training_changes_no_step(run, tmp_path):
    values, _ = run
    evaluation = {**values["evaluation"], "every": 2}
    extend(recipe_of({**values, "output": str(tmp_path / "run"), "evaluation": evaluation}))
    assert losses_of(tmp_path / "run") == losses_of(values["output"])
    assert bytes_of(tmp_path / "run") == bytes_of(values["output"])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": 2}, {"sequence": 2}], ids=str)
def test_two_processes_train_the_adapter_that_one_trains(
    two_ranks, run, tmp_path, tiny_checkpoint, tiny_documents, parallel
):
    values, _ = run
    several = {**values, "output": str(tmp_path / "run"), "parallel": parallel}
    two_ranks.run(extended, several)
    for (*place, loss, norm), (*place_1, loss_1, norm_1) in zip(
        losses_of(several["output"]), losses_of(values["output"]), strict=True
    ):
        assert place == place_1
        assert loss == pytest.approx(loss_1, rel=1e-5)
        assert norm == pytest.approx(norm_1, rel=1e-3)
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        found, expected = (load_file(Path(each["output"]) / name) for each in (several, values))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).abs().max() < 1e-4, key


@pytest.mark.slow
def test_two_processes_stop_and_go_on_as_one(two_ranks, run, tmp_path):
    values, _ = run
    whole = {**values, "output": str(tmp_path / "whole"), "parallel": {"shard": 2}, "precision": "bfloat16"}
    two_ranks.run(extended, whole)
    stopped = {**whole, "output": str(tmp_path / "stopped")}
    shutil.copytree(whole["output"], stopped["output"])
    folder = Path(stopped["output"])
    shutil.rmtree(folder / "model")
    for name in ("stage0-step000003", "stage1-step000002", "stage1-step000003"):
        shutil.rmtree(folder / "checkpoints" / name)
    two_ranks.run(extended, stopped, True)
    alone = {**values, "output": str(tmp_path / "alone"), "precision": "bfloat16"}
    extend(recipe_of(alone))
    for (*_, loss, _), (*_, loss_1, _) in zip(
        losses_of(whole["output"]), losses_of(alone["output"]), strict=True
    ):
        # Weights are gathered in bfloat16 as one process rounds them; sums of gradients differ in their order.
        assert loss == pytest.approx(loss_1, rel=1e-2)
    assert losses_of(stopped["output"]) == losses_of(whole["output"])
    assert bytes_of(stopped["output"]) == bytes_of(whole["output"])


def test_a_damaged_adapter_is_exported_again(run, tmp_path):
    values, _ = run
    output = shutil.copytree(values["output"], tmp_path / "run")
    path = output / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    extend(recipe_of({**values, "output": str(output)}), resume=True)
    assert bytes_of(output) == bytes_of(values["output"])


def test_another_adapter_is_refused_on_resume(run):
    values, _ = run
    with pytest.raises(RopewalkError, match=r"adapter\.rank \(4 in the folder, 8 given\)"):
        extend(recipe_of({**values, "adapter": {**values["adapter"], "rank": 8}}), resume=True)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"targets": ["q_prj"]}, r"did you mean q_proj\?"),
        ({"rank": 64}, r"adapter.rank is 64, but can be at most \d+ for .*; lower adapter.rank"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused_before_anything_is_written(
    run, tmp_path, adapter, message
):
    values, _ = run
    output = tmp_path / "refused"
    with pytest.raises(RopewalkError, match=message):
        extend(recipe_of({**values, "output": str(output), "adapter": adapter}))
    assert not output.exists() or {each.name for each in output.iterdir()} <= {".lock"}


def test_an_adapter_is_no_model_to_load(run):
    values, _ = run
    output = Path(values["output"])
    for folder in (output / "adapter", output / "checkpoints" / "stage1-step000003"):
        for load in (load_model, load_tokenizer):
            with pytest.raises(
                RopewalkError, match="an adapter and no model; give a folder with the merged model"
            ):
                load(str(folder))


@pytest.mark.parametrize(
    ("installed", "processes", "device", "precision", "message"),
    [
        (False, 1, "cuda", "bfloat16", "which needs the package bitsandbytes; pip install 'ropewalk"),
        (True, 2, "cuda", "bfloat16", "cannot be sharded over 2 processes; train with one process"),
        (True, 1, "cpu", "bfloat16", "but bitsandbytes trains only on CUDA, and the device is cpu"),
        (True, 1, "cuda", "float32", "but precision is float32; set precision: bfloat16"),
    ],
)
def test_weights_are_not_quantized_where_they_cannot_be(
    run, monkeypatch, installed, processes, device, precision, message
):
    values, _ = run
    monkeypatch.setattr(preflight, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(preflight, "_device", lambda recipe, world: torch.device(device))
    monkeypatch.setattr(preflight, "_precision", lambda *arguments: precision)
    recipe = recipe_of({**values, "adapter": {"quantize": "nf4"}})
    with pytest.raises(RopewalkError, match=f"adapter.quantize is nf4, .*{message}"):
        resolve(recipe, World(size=processes))


def test_processes_do_not_draw_dropout(run):
    values, _ = run
    with pytest.raises(
        RopewalkError,
        match=r"adapter.dropout is 0\.1, .*set adapter\.dropout to 0, or train with one process",
    ):
        resolve(recipe_of({**values, "adapter": {"dropout": 0.1}}), World(size=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quantized_weights_train_and_the_merged_model_is_the_exact_base_with_the_adapter(
    tmp_path, tiny_documents
):
    pytest.importorskip("bitsandbytes")
    base = save_tiny(tmp_path / "base", hidden_size=64, intermediate_size=128)
    changed = {"adapter": {"rank": 4, "quantize": "nf4"}, "precision": "bfloat16"}
    values = values_of(base, tiny_documents, tmp_path / "run", **changed)
    extend(recipe_of(values))
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "run" / "model"))
    for name, value in before.items():
        assert torch.equal(value, after[name]) == ("mlp" in name or "lm_head" in name), name
    again = {**values, "output": str(tmp_path / "exact"), "adapter": {"rank": 4}}
    extend(recipe_of(again))
    losses, exact = losses_of(values["output"]), losses_of(again["output"])
    assert losses != exact
    for (*_, loss, _), (*_, loss_exact, _) in zip(losses, exact, strict=True):
        assert loss == pytest.approx(loss_exact, rel=0.05)
    # Later steps start from other weights.
    assert losses[0][3] == pytest.approx(exact[0][3], rel=0.3)
