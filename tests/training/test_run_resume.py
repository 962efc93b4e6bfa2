"""What --resume may change, what it checks first, and what it does with damage, other processes and other folders."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import ropewalk.data.rows.pack as packing
from ropewalk import RopewalkError
from ropewalk.cli.app import main
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.training.checkpoint.single import WholeCheckpoints
from tests.marks import compiles
from tests.training.resume_cases import (
    Notes,
    flip,
    metrics_of,
    recipe_of,
    refused,
    weights_of,
    with_stage,
    write,
)
from tests.training.run_cases import extend


def rates_of(output) -> list[float]:
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["learning_rate"] for line in lines]


@pytest.mark.parametrize("harm", ["a digit", "the end", "nothing is left", "it is gone"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_changed_evaluation_is_measured_again(finished, when, harm):
    values, summary = finished
    path = Path(values["output"]) / f"evaluation-{when}.json"
    text = path.read_text()
    if harm == "it is gone":
        path.unlink()
    else:
        score = repr(json.loads(text)[0]["score"])
        changed = {
            "a digit": text.replace(score, score[:-1] + str(9 - int(score[-1]))),
            "the end": text[:-1],
            "nothing is left": "",
        }
        assert changed[harm] != text
        path.write_text(changed[harm])
    notes = Notes()
    assert extend(recipe_of(values), resume=True, reporter=notes)[when] == summary[when]
    assert path.read_text() == text
    assert any(str(path) in line and line.endswith(f"{when} is made again") for line in notes.told)
    assert not (Path(values["output"]) / "earlier").exists()


def test_other_settings_of_the_evaluation_measure_both_sides_again(done, finished, tmp_path):
    values, _ = finished
    other = {**values, "evaluation": {**values["evaluation"], "rows": 3}}
    expected = extend(recipe_of(other, output=str(tmp_path / "whole")))
    found = extend(recipe_of(other), resume=True)
    assert (found["before"], found["after"]) == (expected["before"], expected["after"])
    assert [each["key"] for each in found["history"]] == ["evaluation.rows"]
    assert weights_of(values["output"]) == weights_of(done[0]["output"])
    for when in ("before", "after"):
        kept = Path(values["output"]) / "earlier" / when / f"evaluation-{when}.json"
        assert kept.read_bytes() == (Path(done[0]["output"]) / f"evaluation-{when}.json").read_bytes()


def content_of(output) -> dict[str, bytes]:
    paths = [path for path in Path(output).rglob("*") if path.is_file()]
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("harm", ["a damaged line", "a missing step"])
def test_a_damaged_log_of_steps_is_refused_before_anything_changes(finished, tmp_path, capsys, harm):
    values, _ = finished
    path = Path(values["output"]) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1:2] = [b"\xff" + lines[1][1:]] if harm == "a damaged line" else []
    path.write_bytes(b"".join(lines))
    before = content_of(values["output"])
    said = refused(capsys, tmp_path, values, "--set", "stages.0.steps=8")
    assert (
        f"line 2 of {path} is damaged" if harm == "a damaged line" else "lacks 1 of the 4 completed steps"
    ) in said
    assert content_of(values["output"]) == before


def test_steps_that_are_trained_again_keep_what_the_log_said_of_them(done, cut):
    notes = Notes()
    extend(recipe_of(with_stage(cut, learning_rate=1e-3)), resume=True, reporter=notes)
    kept = Path(cut["output"]) / "earlier" / "metrics.jsonl"
    lines = (Path(done[0]["output"]) / "metrics.jsonl").read_text().splitlines()
    assert kept.read_text().splitlines() == lines[2:]
    assert len(metrics_of(cut["output"])) == 4
    assert any("step 3 of stage 1 to step 4 of stage 1" in line and str(kept) in line for line in notes.told)


def test_a_checkpoint_under_another_steps_name_is_refused(cut, tmp_path, capsys):
    folder = Path(cut["output"]) / "checkpoints"
    (folder / "stage0-step000002").rename(folder / "stage0-step000003")
    said = refused(capsys, tmp_path, cut)
    assert "checkpoint stage0-step000003 is damaged" in said
    assert (
        "the folder contains the checkpoint stage0-step000002; rename the folder to stage0-step000002" in said
    )


@pytest.mark.parametrize("key", ["stage", "step", "tokens"])
@pytest.mark.parametrize("value", ["Infinity", "1e999", '"2"', "null"])
def test_a_checkpoint_with_no_number_in_its_record_is_refused(cut, tmp_path, capsys, key, value):
    record = Path(cut["output"]) / "checkpoints" / "stage0-step000002" / "training_state.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, key: "HERE"}).replace('"HERE"', value))
    assert "checkpoint stage0-step000002 is damaged" in refused(capsys, tmp_path, cut)


def test_a_damaged_recipe_of_the_run_is_told_apart_from_the_one_that_is_given(cut, tmp_path, capsys):
    saved = Path(cut["output"]) / "recipe.yaml"
    saved.write_text(saved.read_text()[:150])
    said = refused(capsys, tmp_path, cut)
    assert f"the run's own recipe.yaml is damaged (recipe {saved}" in said
    assert "restore the file, or start a new run in another output folder" in said


# What may change.


def test_a_run_with_more_steps_is_the_longer_run_to_the_last_bit(done, finished, tmp_path):
    values, summary = finished
    longer = with_stage(values, steps=7)
    extend(recipe_of(longer, output=str(tmp_path / "whole")))
    notes = Notes()
    found = extend(recipe_of(longer), resume=True, reporter=notes)
    output = Path(values["output"])
    assert metrics_of(output) == metrics_of(tmp_path / "whole")
    assert metrics_of(output)[:4] == metrics_of(done[0]["output"])
    assert weights_of(output) == weights_of(tmp_path / "whole")
    assert (output / "evaluation-after.json").read_bytes() == (
        tmp_path / "whole" / "evaluation-after.json"
    ).read_bytes()
    assert "the recipe changes after step 4 of stage 1: stages.0.steps 4 -> 7" in notes.told
    # The shorter run's result is still there.
    earlier = output / "earlier"
    assert json.loads((earlier / "after" / "summary.json").read_text())["after"] == summary["after"]
    assert weights_of(earlier / "model") == weights_of(done[0]["output"])
    change = {"key": "stages.0.steps", "old": 4, "new": 7, "stage": 0, "step": 4}
    assert found["history"] == [change]
    assert json.loads((output / "run.json").read_text())["history"] == [change]
    assert yaml.safe_load((output / "recipe.yaml").read_text())["stages"][0]["steps"] == 7
    again = extend(recipe_of(longer), resume=True)
    assert again["history"] == [change]
    assert len(metrics_of(output)) == 7


@pytest.mark.parametrize("harm", ["deleted", "altered"])
def test_a_longer_run_is_measured_again_whatever_became_of_its_first_result(finished, harm):
    values, _ = finished
    longer = with_stage(values, steps=6, learning_rate=1e-3)
    model, notes = Path(values["output"]) / "model", Notes()
    if harm == "deleted":
        shutil.rmtree(model)
    else:
        flip(model / "model.safetensors")
    found = extend(recipe_of(longer), resume=True, reporter=notes)
    assert any("model is made again, because the run continues after step 4" in line for line in notes.told)
    assert found["after"] != json.loads(
        (Path(values["output"]) / "earlier" / "after" / "evaluation-after.json").read_text()
    )


def test_a_lower_learning_rate_holds_for_the_steps_to_come(done, cut):
    notes = Notes()
    extend(recipe_of(with_stage(cut, learning_rate=1e-3)), resume=True, reporter=notes)
    assert rates_of(cut["output"]) == [1e-2, 1e-2, 1e-3, 1e-3]
    assert metrics_of(cut["output"])[:3] == metrics_of(done[0]["output"])[:3]
    assert metrics_of(cut["output"])[3] != metrics_of(done[0]["output"])[3]
    assert "the recipe changes after step 2 of stage 1: stages.0.learning_rate 0.01 -> 0.001" in notes.told
    assert (
        "the learning rate of stage 1 is 0.01 in step 2, and 0.001 in step 3 instead of 0.01; constant, it is 0.001 in "
        "the last step, 4" in notes.told
    )


def test_another_stage_goes_behind_a_finished_run(finished, tmp_path):
    """As if it had been there from the first: the same rows, the same losses, and both measured at the new target."""
    values, _ = finished
    second = {"context": 128, "steps": 3, "rows_per_step": 2, "learning_rate": 1e-2, "pattern": "anchor"}
    both = {**values, "stages": [*values["stages"], second]}
    whole = extend(recipe_of(both, output=str(tmp_path / "whole")))
    found = extend(recipe_of(both), resume=True)
    assert metrics_of(values["output"]) == metrics_of(tmp_path / "whole")
    assert weights_of(values["output"]) == weights_of(tmp_path / "whole")
    assert (found["before"], found["after"]) == (whole["before"], whole["after"])
    assert [change["key"] for change in found["history"]] == ["stages.1"]
    earlier = Path(values["output"]) / "earlier"
    for name in ("before/evaluation-before.json", "after/evaluation-after.json", "model/model/config.json"):
        assert (earlier / name).is_file()


def test_a_new_stage_needs_the_documents_of_the_others(finished):
    values, _ = finished
    original = Path(values["data"]["sources"][0])
    kept = original.read_bytes()
    second = {"context": 128, "steps": 1, "rows_per_step": 2, "pattern": "anchor"}
    try:
        original.write_bytes(b"".join(kept.splitlines(keepends=True)[::-1]))
        with pytest.raises(RopewalkError, match="the documents have changed since the run"):
            extend(recipe_of({**values, "stages": [*values["stages"], second]}), resume=True)
    finally:
        original.write_bytes(kept)
    assert (Path(values["output"]) / "model").is_dir()


def test_what_cannot_change_a_number_changes_freely(done, cut, tiny_checkpoint, tmp_path):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "same weights")
    free = {
        **with_stage(cut, gradient_checkpointing=True),
        "model": str(model),
        "checkpoints": {"every": 1, "keep": 1, "asynchronous": False},
        "precision": "float32",
    }
    free["data"] = {**cut["data"], "workers": 2, "cache": str(tmp_path / "cache")}
    notes = Notes()
    found = extend(recipe_of(free), resume=True, reporter=notes)
    assert metrics_of(cut["output"]) == metrics_of(done[0]["output"])
    assert weights_of(cut["output"]) == weights_of(done[0]["output"])
    assert found["history"] == []
    assert not any("the recipe changes" in line for line in notes.told)
    assert len(list((Path(cut["output"]) / "checkpoints").iterdir())) == 1


def assert_rounded_otherwise(done, cut, setting):
    extend(recipe_of(with_stage(cut, **setting)), resume=True)
    found, expected = metrics_of(cut["output"]), metrics_of(done[0]["output"])
    # The steps before were taken without it.
    assert found[:2] == expected[:2]
    assert [line[2] for line in found] == pytest.approx([line[2] for line in expected], rel=1e-5)


@pytest.mark.parametrize("setting", [{"offload_optimizer": True}, {"tiled_mlp": 16}], ids=str)
def test_what_saves_memory_changes_a_resumed_run_by_rounding(done, cut, setting):
    assert_rounded_otherwise(done, cut, setting)


@pytest.mark.slow
@compiles
def test_a_compiled_run_goes_on_to_the_last_bit_and_a_plain_one_by_rounding(done, cut, tmp_path):
    """In one test, so that no two processes compile the same kernels."""
    compiled = with_stage(done[0], compile=True)
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    extend(recipe_of(compiled, output=whole))
    extend(recipe_of(with_stage(compiled, steps=2), output=parts))
    torch.compiler.reset()
    extend(recipe_of(compiled, output=parts), resume=True)
    assert metrics_of(parts) == metrics_of(whole)
    assert weights_of(parts) == weights_of(whole)
    assert_rounded_otherwise(done, cut, {"compile": True})


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("seed=1", "seed (0 in the folder, 1 given)"),
        ("stages.0.context=128", "stages.0.context (64 in the folder, 128 given)"),
        ("stages.0.rope=yarn", "stages.0.rope.method (default in the folder, yarn given)"),
        ("stages.0.rows_per_step=4", "stages.0.rows_per_step (2 in the folder, 4 given)"),
        ("stages.0.steps=1", "stages.0.steps 4 -> 1 (2 steps of stage 1 are done"),
        ("data.eos=false", "data.eos (true in the folder, false given)"),
        ("data.mixture={shuffle: true}", "data.mixture (none in the folder, {"),
        ("data.validation_documents=10", "data.validation_documents (20 in the folder, 10 given)"),
        ("exact_rope=false", "exact_rope (true in the folder, false given)"),
        ("precision=bfloat16", "precision (float32 in the folder, bfloat16 given)"),
    ],
)
def test_what_may_not_change_is_refused_with_its_reason(cut, tmp_path, capsys, override, why):
    before = content_of(cut["output"])
    said = refused(capsys, tmp_path, cut, "--set", override)
    assert why in said
    assert "start a new run in another output folder" in said
    assert content_of(cut["output"]) == before


def test_a_change_that_is_refused_is_not_announced(cut):
    notes = Notes()
    with pytest.raises(RopewalkError, match=r"differs in data\.eos"):
        extend(recipe_of(cut, data={**cut["data"], "eos": False}), resume=True, reporter=notes)
    assert not any("the recipe changes" in line for line in notes.told)


def test_another_model_is_refused_whatever_its_name(cut, tiny_checkpoint, tmp_path, capsys):
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    digest = model_digest(str(tiny_checkpoint))
    assert f"model ({digest} in the folder, {model_digest(str(other))} given)" in refused(
        capsys, tmp_path, cut, "--set", f"model={other}"
    )
    for record in (Path(cut["output"]) / "steps").glob("*.json"):
        record.write_text(record.read_text().replace(f'"{digest}"', "null"))
    assert "cannot check whether the weights are the same" in refused(
        capsys, tmp_path, cut, "--set", f"model={other}"
    )


def test_weights_in_a_folder_below_that_changed_are_refused(cut, tiny_checkpoint, tmp_path, capsys):
    """As an index may place them; without a checkpoint, a run would compare one model before with another after."""
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    (other / "parts").mkdir()
    (other / "model.safetensors").rename(other / "parts" / "all.safetensors")
    names = load_file(other / "parts" / "all.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "parts/all.safetensors")}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    values = {**cut, "model": str(other), "output": str(tmp_path / "run")}
    extend(recipe_of(values))
    before = model_digest(str(other))
    flip(other / "parts" / "all.safetensors")
    said = refused(capsys, tmp_path, values)
    assert f"model ({before} in the folder, {model_digest(str(other))} given)" in said


# One run a folder.


def test_a_run_holds_its_folder_until_its_end(done, cut, monkeypatch):
    seen = []
    save = WholeCheckpoints.save

    def look(*arguments):
        with pytest.raises(RopewalkError, match=f"process {os.getpid()} on"):
            extend(recipe_of(cut), resume=True)
        seen.append(arguments)
        return save(*arguments)

    monkeypatch.setattr(WholeCheckpoints, "save", look)
    extend(recipe_of(cut), resume=True)
    assert len(seen) == 1
    assert not (Path(cut["output"]) / ".lock").exists()


# The order of checks.


@pytest.fixture
def no_model(monkeypatch):
    def load(*_, **__):
        raise AssertionError("the model was loaded before the check")

    monkeypatch.setattr("ropewalk.training.run.load_for_run", load)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sources": ["nowhere.jsonl"]}, "nowhere.jsonl"),
        ({"sources": [{"path": "DOCUMENTS", "text_field": "body"}]}, "body"),
        (
            {"sources": ["DOCUMENTS"], "validation_sources": [{"path": "DOCUMENTS", "text_field": "body"}]},
            "body",
        ),
        ({"sources": ["DOCUMENTS", "DOCUMENTS"]}, "is given twice"),
        ({"rows": ["nowhere"]}, "nowhere"),
    ],
)
def test_sources_are_looked_at_before_the_model_is_loaded(done, tmp_path, no_model, data, message):
    values, _ = done
    text = yaml.safe_dump(data).replace("DOCUMENTS", values["data"]["sources"][0])
    recipe = recipe_of(values, output=str(tmp_path / "run"), data=yaml.safe_load(text))
    with pytest.raises(RopewalkError, match=message):
        extend(recipe)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_refused_before_the_model_is_loaded(cut, no_model):
    output = Path(cut["output"])
    flip(output / "checkpoints" / "stage0-step000002" / "training_state.json")
    (output / "evaluation-before.json").unlink()
    with pytest.raises(RopewalkError, match="checkpoint stage0-step000002 is damaged"):
        extend(recipe_of(cut), resume=True)


def test_a_run_that_was_killed_while_it_packed_goes_on_with_resume_too(done, tmp_path, monkeypatch, capsys):
    values, _ = done
    cut_off = {**values, "output": str(tmp_path / "run")}
    with monkeypatch.context() as patch:
        patch.setattr(packing, "write_rows", lambda *_: (_ for _ in ()).throw(InterruptedError()))
        with pytest.raises((InterruptedError, RopewalkError)):
            extend(recipe_of(cut_off))
    assert (tmp_path / "run" / "data").is_dir()
    assert not (tmp_path / "run" / "recipe.yaml").exists()
    notes = Notes()
    extend(recipe_of(cut_off), resume=True, reporter=notes)
    assert any("was interrupted before training started; it continues" in line for line in notes.told)
    assert metrics_of(cut_off["output"]) == metrics_of(values["output"])


def test_ctrl_c_names_the_last_checkpoint_and_how_to_go_on(done, tmp_path, monkeypatch, capsys):
    values, _ = done
    output = tmp_path / "run"
    file = write(tmp_path / "recipe.yaml", {**values, "output": str(output)})
    save = WholeCheckpoints.save

    def interrupt(*_):
        raise KeyboardInterrupt

    def saved_then_interrupted(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    def said(place, name, instead, *options):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, instead)
            assert main(["extend", file, *options]) == 130
        return capsys.readouterr().err.splitlines()[-1]

    import ropewalk.training.run as run

    assert said(run, "started", interrupt) == (
        "error: interrupted: no training step is done yet; run the same command to start again (it uses the rows "
        "that are already packed)"
    )
    assert said(WholeCheckpoints, "save", interrupt) == (
        f"error: interrupted: the run in {output} has no checkpoint yet; the same command with --resume restarts "
        "its training"
    )
    assert said(WholeCheckpoints, "save", saved_then_interrupted, "--resume") == (
        f"error: interrupted: the last checkpoint is {output}/checkpoints/stage0-step000002; the same command with "
        "--resume continues from this checkpoint"
    )
    assert main(["extend", file, "--resume"]) == 0
    assert metrics_of(output) == metrics_of(values["output"])


def test_a_diverged_run_says_how_it_goes_on_with_a_lower_rate(done, tmp_path, capsys):
    values, _ = done
    file = write(
        tmp_path / "recipe.yaml",
        {**with_stage(values, learning_rate=1e30, steps=8), "output": str(tmp_path / "run")},
    )
    assert main(["extend", file]) == 1
    assert "--resume --set stages.0.learning_rate=5e+29" in capsys.readouterr().err
    assert main(["extend", file, "--resume", "--set", "stages.0.learning_rate=1e-3"]) == 0
    rates = rates_of(tmp_path / "run")
    assert len(rates) == 8
    assert rates[-1] == 1e-3
    assert load_file(tmp_path / "run" / "model" / "model.safetensors")


def test_a_run_does_not_go_on_with_a_base_that_another_version_would_choose(
    cut, tmp_path, monkeypatch, capsys
):
    from ropewalk.rope import target
    from ropewalk.rope.theory import recommended_theta

    def doubled(base, *lengths):
        found = recommended_theta(base, *lengths)
        return dataclasses.replace(found, rope_theta=2 * found.rope_theta)

    monkeypatch.setattr(target, "recommended_theta", doubled)
    trained = recommended_theta(10_000, 32, 64).rope_theta
    error = refused(capsys, tmp_path, cut)
    assert f"stages.0.rope.rope_theta ({trained} in the folder, " in error
    # The old value is not written in the recipe; whoever writes it there goes on, to the bit.
    extend(recipe_of(with_stage(cut, rope={"rope_theta": trained})), resume=True)
    assert len(metrics_of(cut["output"])) == 4
