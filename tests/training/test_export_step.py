"""The model of any checkpoint of a run, whole or sharded, equals the one that the run itself had there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropewalk import RopewalkError
from ropewalk.cli.app import main
from ropewalk.training.export_step import export_step
from tests.training.resume_cases import recipe_of
from tests.training.run_cases import extend, extended


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_the_last_step_is_the_runs_own_result(done, tmp_path):
    values, _ = done
    found = export_step(Path(values["output"]), 4, tmp_path / "out")
    assert (found.stage, found.step, found.tokens) == (1, 4, 4 * 2 * 64)
    result = Path(values["output"]) / "model"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        result / "model.safetensors"
    ).read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", result)]
    assert configs[0] == configs[1]


def test_an_earlier_step_has_the_checkpoints_weights_and_loads_in_plain_transformers(done, tmp_path, capsys):
    run = Path(done[0]["output"])
    assert main(["export", str(run), "--step", "2", "--out", str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checkpoint"] == str(run / "checkpoints" / "stage0-step000002")
    there = weights(run / "checkpoints" / "stage0-step000002")
    assert all(
        torch.equal(tensor, there[name].to(tensor)) for name, tensor in weights(tmp_path / "out").items()
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.max_position_embeddings == 64


@pytest.mark.slow
def test_a_sharded_checkpoint_is_written_by_one_process(done, two_ranks, tmp_path):
    values = {
        **done[0],
        "output": str(tmp_path / "run"),
        "parallel": {"shard": 2},
        "checkpoints": {"every": 2},
    }
    two_ranks.run(extended, values)
    run = tmp_path / "run"
    assert list((run / "checkpoints" / "stage0-step000004").glob("*.distcp"))
    export_step(run, 4, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        run / "model" / "model.safetensors"
    ).read_bytes()
    one = export_step(Path(done[0]["output"]), 2, tmp_path / "one")
    two = export_step(run, 2, tmp_path / "two")
    for name, tensor in weights(one.out).items():
        # Sums over ranks differ in rounding.
        torch.testing.assert_close(weights(two.out)[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_the_recipe_says_of_processes_does_not_matter(done, tmp_path):
    run = shutil.copytree(done[0]["output"], tmp_path / "run")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["stages"][0]["parallel"] = {"shard": 2, "ring": 4}
    recipe |= {"parallel": {"sequence": 2}, "device": "cuda"}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    export_step(run, 4, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        run / "model" / "model.safetensors"
    ).read_bytes()


def test_an_adapter_is_merged_as_at_the_end_of_its_run(done, tmp_path):
    run = tmp_path / "run"
    extend(recipe_of(done[0], output=str(run), adapter={"rank": 2}))
    export_step(run, 4, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        run / "model" / "model.safetensors"
    ).read_bytes()


def refused(run, *arguments):
    with pytest.raises(RopewalkError) as caught:
        export_step(run, *arguments)
    return str(caught.value)


def test_what_is_not_there_is_named_with_what_is(done, tmp_path):
    run, out = Path(done[0]["output"]), tmp_path / "out"
    assert (
        refused(run, 3, out)
        == f"{run} has no checkpoint of step 3; choose one of step 2 (stage 1), step 4 (stage 1)"
    )
    assert "no checkpoint of step 2 of stage 2; choose one of" in refused(run, 2, out, 2)
    assert "already exists" in refused(run, 2, tmp_path)
    assert not out.exists()


def test_several_stages_with_the_step_and_a_damaged_checkpoint(done, tmp_path):
    run = shutil.copytree(done[0]["output"], tmp_path / "run")
    checkpoint = run / "checkpoints" / "stage0-step000002"
    shutil.copytree(checkpoint, checkpoint.with_name("stage1-step000002"))
    assert (
        refused(run, 2, tmp_path / "out")
        == "several stages have a checkpoint of step 2; add either --stage 1 or --stage 2"
    )
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors is 10 bytes short; export another checkpoint" in refused(
        run, 2, tmp_path / "out", 1
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--step", "2"], "--step needs --out DIR"),
        (["--stage", "2"], "--stage needs --step N"),
        (["--step", "2", "--out", "o", "--push", "a/b"], "--step and --push cannot be combined"),
        (["--step", "2", "--out", "o"], "--step needs the folder of a training run"),
        (["--step", "0", "--out", "o"], "--step"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, capsys, options, why):
    (tmp_path / "config.json").write_text(yaml.safe_dump({}))
    assert main(["export", str(tmp_path), *options]) == 2
    assert why in capsys.readouterr().err
