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
from ropewalk.evaluation.store import model_digest
from ropewalk.io.digests import FileDigest, write_sealed
from ropewalk.training.checkpoint.files import EXPORT_RECORD
from ropewalk.training.checkpoint.single import WholeCheckpoints
from tests.marks import compiles
from tests.training.resume_cases import Notes, recipe_of, refused, weights_of, with_stage, write
from tests.training.run_cases import extend


def metrics_of(output) -> list[tuple]:
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(line["stage"], line["step"], line["loss"], line["tokens"]) for line in found]


def rates_of(output) -> list[float]:
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["learning_rate"] for line in lines]


@pytest.fixture
def cut(done, tmp_path):
    """A copy as if it had been killed after its second step."""
    values, _ = done
    output = shutil.copytree(values["output"], tmp_path / "cut")
    shutil.rmtree(output / "checkpoints" / "stage0-step000004")
    for name in ("model", "summary.json", "evaluation-after.json", "evaluation-after.digest.json"):
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {**values, "output": str(output)}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# The result.


def test_a_flipped_byte_in_the_result_is_found_and_the_result_made_again(done, finished, tmp_path, capsys):
    values, summary = finished
    output = Path(values["output"])
    flip(output / "model" / "model.safetensors")
    damaged = weights_of(output)
    (output / "summary.json").unlink()
    assert main(["extend", write(tmp_path / "recipe.yaml", values), "--resume", "--json"]) == 0
    printed = capsys.readouterr()
    assert "model.safetensors was altered: its SHA-256 differs" in printed.err
    assert "exported again from stage0-step000004" in printed.err
    assert weights_of(output) == weights_of(done[0]["output"]) != damaged
    assert json.loads(printed.out)["after"] == summary["after"]
    kept = output / "earlier" / "stage0-step000004"
    assert (kept / "model" / "model.safetensors").read_bytes() == damaged
    assert (kept / "evaluation-after.json").is_file()
    assert metrics_of(output) == metrics_of(done[0]["output"])


@pytest.mark.parametrize("how", ["a file is missing", "the record is altered", "the record is missing"])
def test_a_result_that_cannot_be_trusted_is_made_again(done, finished, how):
    values, summary = finished
    model = Path(values["output"]) / "model"
    if how == "a file is missing":
        (model / "tokenizer.json").unlink()
    elif how == "the record is altered":
        flip(model / EXPORT_RECORD)
    else:
        (model / EXPORT_RECORD).unlink()
    notes = Notes()
    assert extend(recipe_of(values), resume=True, reporter=notes)["after"] == summary["after"]
    assert any("is not what the run saved" in line for line in notes.told)
    assert weights_of(values["output"]) == weights_of(done[0]["output"])
    assert sorted(path.name for path in model.iterdir()) == sorted(
        path.name for path in (Path(done[0]["output"]) / "model").iterdir()
    )


def test_a_damaged_result_without_checkpoints_is_refused_by_name(finished, tmp_path, capsys):
    values, _ = finished
    output = Path(values["output"])
    shutil.rmtree(output / "checkpoints")
    flip(output / "model" / "model.safetensors")
    before = weights_of(output)
    said = refused(capsys, tmp_path, values)
    assert "model.safetensors was altered" in said
    assert "there is no checkpoint" in said
    assert weights_of(output) == before
    assert len(metrics_of(output)) == 4


def test_a_finished_run_without_its_checkpoints_is_done_and_trains_nothing(finished, tmp_path, capsys):
    values, summary = finished
    output = Path(values["output"])
    shutil.rmtree(output / "checkpoints")
    (output / "summary.json").write_text("{damaged")
    assert extend(recipe_of(values), resume=True)["after"] == summary["after"]
    assert json.loads((output / "summary.json").read_text())["after"] == summary["after"]
    assert not (output / "checkpoints").exists()
    assert len(metrics_of(output)) == 4
    said = refused(capsys, tmp_path, with_stage(values, steps=6))
    assert (
        f"has no checkpoint left to continue training from; start a new run with model: {output}/model"
        in said
    )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[{", "line 1 column"),
        ("[1]", "a result must be a JSON object, got 1"),
        ("{}x", "Extra data"),
        ('[{"suite": "perplexity"}]', "has no unit"),
        ('[{"suite": "perplexity", "unit": "percent"}]', "a result lacks 'task'"),
        ("{}", "it is not a list of results"),
        ("[]", "it lacks a result of perplexity at 64 tokens"),
        ("[NaN]", "NaN is not a JSON value"),
        ("OTHER", "it lacks a result of perplexity at 64 tokens"),
        ("MORE", "it holds a result of perplexity at 32 tokens, which the recipe does not list"),
    ],
)
def test_a_damaged_evaluation_is_refused_by_name(finished, tmp_path, capsys, when, content, why):
    """By its contents alone: its digest is that of the damaged file."""
    values, _ = finished
    path = Path(values["output"]) / f"evaluation-{when}.json"
    whole = json.loads(path.read_text())
    other = [{**each, "length": 32} for each in whole]
    special = {"OTHER": json.dumps(other), "MORE": json.dumps([*whole, *other])}
    path.write_text(special.get(content, content))
    record = path.with_name(f"evaluation-{when}.digest.json")
    write_sealed(record, {}, {path.name: FileDigest.of(path)})
    said = refused(capsys, tmp_path, values)
    assert f"{path} is damaged ({why}" in said or (f"{path} is damaged (" in said and why in said)
    assert "delete it, and --resume will repeat the evaluation" in said
    assert "Error:" not in said
    assert "_NoJson" not in said


@pytest.mark.parametrize("harm", ["a digit", "the end", "the record"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_changed_evaluation_is_refused_and_measured_again_when_deleted(
    finished, tmp_path, capsys, when, harm
):
    values, summary = finished
    path = Path(values["output"]) / f"evaluation-{when}.json"
    text = path.read_text()
    if harm == "a digit":
        score = repr(json.loads(text)[0]["score"])
        changed = text.replace(score, score[:-1] + str(9 - int(score[-1])))
        assert changed != text
        path.write_text(changed)
        why = "was altered: its SHA-256 differs"
    elif harm == "the end":
        path.write_text(text[:-1])
        why = "is 1 bytes short"
    else:
        flip(path.with_name(f"evaluation-{when}.digest.json"))
        why = f"its record evaluation-{when}.digest.json was altered"
    said = refused(capsys, tmp_path, values)
    assert f"{path} is damaged (" in said
    assert why in said
    path.unlink()
    assert extend(recipe_of(values), resume=True)[when] == summary[when]
    assert path.read_text() == text


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


# What a run began with.


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Expecting value"),
        ('{"rows": [', "Expecting value"),
        ("[]", "must be a mapping of rows"),
        ("{}", "rows is missing"),
        (
            '{"rows": [3], "digests": ["a"], "validation_sources": null, REST}',
            "rows.0 must be a string, got 3",
        ),
        ('{"rows": [], "digests": ["a"], "validation_sources": null, REST}', "got 0 rows and 1 digests"),
        ('{"rows": [], "digests": [], "validation_sources": null}', "unpacked is missing"),
        ("[" * 5000, "its brackets are nested too deeply"),
        (b"\xff\xfe", "codec can't decode"),
        (None, "is missing"),
    ],
)
def test_a_damaged_record_of_rows_is_refused_in_one_sentence(cut, tmp_path, capsys, content, why):
    path = Path(cut["output"]) / "rows.json"
    if content is None:
        path.unlink()
    else:
        rest = '"unpacked": null, "model": null, "precision": "float32"'
        path.write_bytes(content if isinstance(content, bytes) else content.replace("REST", rest).encode())
    said = refused(capsys, tmp_path, cut)
    assert str(path) in said
    assert why in said
    assert "restore the file, or start a new run in another output folder" in said


def test_a_run_goes_on_in_another_folder_on_its_own_rows(done, cut, monkeypatch):
    """Nothing is read from the documents: they are gone."""
    output = Path(cut["output"])
    record = json.loads((output / "rows.json").read_text())
    assert record["rows"][0].startswith("data/")
    monkeypatch.setattr("ropewalk.training.documents.prepare_rows", None)
    extend(recipe_of(cut), resume=True)
    assert metrics_of(output) == metrics_of(done[0]["output"])
    assert weights_of(output) == weights_of(done[0]["output"])


@pytest.mark.parametrize("harm", ["a flipped byte", "a short file", "the manifest"])
def test_damaged_rows_name_the_folder_to_delete(done, cut, tmp_path, capsys, harm):
    (folder,) = (path.parent for path in (Path(cut["output"]) / "data").glob("*/manifest.json"))
    file = next(folder.glob("rows-*.arrow"))
    if harm == "a flipped byte":
        flip(file)
    elif harm == "a short file":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (folder / "manifest.json").write_text('{"format": "ropewalk packed rows", ')
    said = refused(capsys, tmp_path, cut)
    assert f"delete the folder {folder}" in said
    assert "--resume" in said
    shutil.rmtree(folder)
    extend(recipe_of(cut), resume=True)
    assert metrics_of(cut["output"]) == metrics_of(done[0]["output"])


def test_rows_that_another_run_has_packed_are_checked_before_training(done, tmp_path):
    values, _ = done
    cache = shutil.copytree(Path(values["output"]) / "data", tmp_path / "cache")
    flip(next(cache.glob("*/rows-*.arrow")))
    shared = {**values, "output": str(tmp_path / "run"), "data": {**values["data"], "cache": str(cache)}}
    with pytest.raises(
        RopewalkError, match=r"is damaged: its SHA-256 is not the one in manifest\.json; delete the folder"
    ):
        extend(recipe_of(shared))


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
    kept = output / "earlier" / "stage0-step000004"
    assert json.loads((kept / "summary.json").read_text())["after"] == summary["after"]
    assert weights_of(kept) == weights_of(done[0]["output"])
    change = {"key": "stages.0.steps", "old": 4, "new": 7, "stage": 0, "step": 4}
    assert found["history"] == [change]
    saved = yaml.safe_load((output / "recipe.yaml").read_text())
    assert saved["history"] == [change]
    assert saved["stages"][0]["steps"] == 7
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
    said = [
        line for line in notes.told if "exported again after the steps that follow stage0-step000004" in line
    ]
    assert len(said) == (harm == "altered")
    assert found["after"] != json.loads(
        (Path(values["output"]) / "earlier" / "stage0-step000004" / "evaluation-after.json").read_text()
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
    assert {path.name for path in (Path(values["output"]) / "earlier" / "stage0-step000004").iterdir()} >= {
        "evaluation-before.json",
        "evaluation-after.json",
        "evaluation-before.digest.json",
        "evaluation-after.digest.json",
        "model",
    }


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


@compiles
@pytest.mark.parametrize(
    "setting", [{"offload_optimizer": True}, {"tiled_mlp": 16}, {"compile": True}], ids=str
)
def test_what_saves_memory_or_time_changes_a_resumed_run_by_rounding(done, cut, setting):
    extend(recipe_of(with_stage(cut, **setting)), resume=True)
    found, expected = metrics_of(cut["output"]), metrics_of(done[0]["output"])
    # The steps before were taken without it.
    assert found[:2] == expected[:2]
    assert [line[2] for line in found] == pytest.approx([line[2] for line in expected], rel=1e-5)


@compiles
def test_a_compiled_run_goes_on_to_the_last_bit(done, tmp_path):
    compiled = with_stage(done[0], compile=True)
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    extend(recipe_of(compiled, output=whole))
    extend(recipe_of(with_stage(compiled, steps=2), output=parts))
    torch.compiler.reset()
    extend(recipe_of(compiled, output=parts), resume=True)
    assert metrics_of(parts) == metrics_of(whole)
    assert weights_of(parts) == weights_of(whole)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("seed=1", "seed 0 -> 1 (what was computed so far depends on it)"),
        ("stages.0.context=128", "stages.0.context 64 -> 128 (the stage has started with the old value)"),
        ("stages.0.rope=yarn", "stages.0.rope.method theta -> yarn (the stage keeps the RoPE"),
        ("stages.0.rows_per_step=4", "stages.0.rows_per_step 2 -> 4 (the stage has started"),
        ("stages.0.steps=1", "stages.0.steps 4 -> 1 (2 steps of stage 1 are done"),
        ("data.eos=false", "data.eos true -> false (the rows of this run are already packed"),
        ("data.mixture={shuffle: true}", "data.mixture none -> "),
        ("data.validation_documents=10", "data.validation_documents 20 -> 10"),
        (
            "evaluation.rows=3",
            "evaluation.rows 2 -> 3 (the model was measured with the old value before training",
        ),
        ("exact_rope=false", "exact_rope true -> false"),
        (
            "precision=bfloat16",
            "started with precision float32, but cannot resume in bfloat16; set precision: float32",
        ),
    ],
)
def test_what_may_not_change_is_refused_with_its_reason(cut, tmp_path, capsys, override, why):
    assert why in refused(capsys, tmp_path, cut, "--set", override)
    assert len(metrics_of(cut["output"])) == 4


def test_another_model_is_refused_whatever_its_name(cut, tiny_checkpoint, tmp_path, capsys):
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert "have changed since the run" in refused(capsys, tmp_path, cut, "--set", f"model={other}")
    record = Path(cut["output"]) / "rows.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "model": None}))
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
    output = Path(cut["output"])
    shutil.rmtree(output / "checkpoints")
    record = output / "rows.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "model": model_digest(str(other))}))
    flip(other / "parts" / "all.safetensors")
    assert "have changed since the run" in refused(capsys, tmp_path, cut, "--set", f"model={other}")


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

    assert said(run, "take_up", interrupt) == (
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
    assert f"was trained with method default and rope_theta {trained:.10g}" in error
    assert f"set stages.0.rope.rope_theta to {trained:.10g}" in error
    # What the message says to do goes on, to the bit.
    given = with_stage(cut, rope={"rope_theta": float(f"{trained:.10g}")})
    saved = Path(cut["output"]) / "recipe.yaml"
    saved.write_text(yaml.safe_dump({**yaml.safe_load(saved.read_text()), "stages": given["stages"]}))
    extend(recipe_of(given), resume=True)
    assert len(metrics_of(cut["output"])) == 4
