"""Stages with ``rope: auto``: what is chosen, that a resumed run never chooses again, and what is refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

import ropewalk.training.run as run
import ropewalk.training.stage as stage
import ropewalk.training.stage_rope.auto as choice
from ropewalk import ModelSetup, RopewalkError, load_model
from ropewalk.cli.app import main
from ropewalk.data import open_rows
from ropewalk.data.read.draw import drawn
from ropewalk.evaluation import evaluation_rows
from ropewalk.io.progress import Silent
from ropewalk.models.compute.losses import OutputHead
from ropewalk.reporting.run.training import write_run_report
from ropewalk.rope import Default, scaled_theta
from ropewalk.rope.theory import recommended_theta
from ropewalk.training.preflight import announcement, resolve
from ropewalk.training.recipe.file import dump_recipe, parse_recipe
from tests.evaluation.evaluation_cases import perplexity_by_position
from tests.programs import ROPEWALK, run_program
from tests.training.run_cases import extend

CANDIDATES = ["theta=2", "critical-dimension", "ntk", "current"]


def recipe_of(values):
    return parse_recipe(yaml.safe_dump(values), "test")


def losses(output) -> list[tuple[int, int, float]]:
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [(line["stage"], line["step"], line["loss"]) for line in lines]


def choices(output):
    return json.loads((Path(output) / "rope-choices.json").read_text())


def three_stages():
    """One that teaches the words, one that chooses, one that builds on the choice."""
    stage = {"steps": 6, "rows_per_step": 4, "learning_rate": 1e-2, "pattern": "full"}
    auto = {"method": "auto", "candidates": list(CANDIDATES)}
    return [
        {**stage, "context": 64, "steps": 12},
        {**stage, "context": 128, "rope": auto},
        {**stage, "context": 256},
    ]


@pytest.fixture
def auto_values(recipe_values):
    """A recipe of three such stages, as plain values to change."""
    return {**recipe_values, "stages": three_stages(), "checkpoints": {"every": 4, "keep": 9}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_checkpoint, tiny_documents):
    """One finished run of such a recipe: its values, its summary and what it said."""
    values = {
        "model": str(tiny_checkpoint),
        "output": str(tmp_path_factory.mktemp("runs") / "whole"),
        "data": {"sources": [str(tiny_documents)], "validation_documents": 20},
        "stages": three_stages(),
        "checkpoints": {"every": 4, "keep": 9},
        "evaluation": {"suites": ["perplexity"], "rows": 2},
    }
    said = Told()
    return values, extend(recipe_of(values), reporter=said), said.lines


class Told:
    """A reporter that remembers what it was told."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    def bar(self, label, total):
        return Silent().bar(label, total)


def test_the_base_of_lowest_loss_is_trained_with(finished, tiny_documents):
    """Each candidate's loss is that of the stage's first checkpoint loaded with it, on the held-out documents."""
    values, summary, _ = finished
    chosen = summary["stages"][1]["choice"]
    assert chosen == choices(values["output"])[0]
    assert [result["name"] for result in chosen["results"]][-1] == "theta=2"
    assert chosen["text"] == "held-out"
    start = Path(values["output"]) / "checkpoints" / "stage0-step000012"
    first = summary["stages"][0]["rope_theta"]
    assert first == scaled_theta(1e4, 32, 64)
    bases = {result["name"]: result["rope_theta"] for result in chosen["results"]}
    assert bases == pytest.approx(
        {
            "theta=2": 2,
            "critical-dimension": scaled_theta(first, 64, 128),
            "ntk": first * 2 ** (8 / 6),
            "current": first,
        },
        rel=1e-12,
    )
    folder = json.loads((Path(values["output"]) / "rows.json").read_text())["rows"][1]
    held_out = open_rows(Path(values["output"]) / folder).validation
    documents = [document.input_ids for document in drawn(held_out, recipe_of(values).seed)]
    rows = evaluation_rows(documents, 128, 0, None, 4).rows
    assert chosen["rows"] == len(rows)
    for result in chosen["results"]:
        model = load_model(
            start, ModelSetup(rope=Default(8, result["rope_theta"]), max_position_embeddings=128)
        )
        found = perplexity_by_position(model, OutputHead.of(model), rows, [0, 64, 128])
        assert result["loss"] == pytest.approx(math.log(found.overall.perplexity), rel=1e-9)
        assert result["beyond_loss"] == pytest.approx(math.log(found.bins[1].perplexity), rel=1e-9)
    assert chosen["name"] == min(chosen["results"], key=lambda result: result["loss"])["name"]
    config = json.loads(
        (Path(values["output"]) / "checkpoints" / "stage1-step000006" / "config.json").read_text()
    )
    assert config["rope_parameters"]["rope_theta"] == chosen["rope_theta"]


def test_later_stages_build_on_the_choice(finished):
    _, summary, _ = finished
    chosen = summary["stages"][1]["rope_theta"]
    assert summary["stages"][2]["rope_theta"] == scaled_theta(chosen, 128, 256)
    config = json.loads((Path(summary["model"]) / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == scaled_theta(chosen, 128, 256)
    assert config["max_position_embeddings"] == 256
    assert "choice" not in summary["stages"][0]


def test_notes_and_report_say_who_won_and_by_how_much(finished):
    values, summary, said = finished
    assert any(
        line.startswith("stage 2: 128 tokens, auto with a base to be chosen in the run") for line in said
    )
    assert any(
        line.startswith("stage 3: 256 tokens, theta with a base to be chosen in the run") for line in said
    )
    (line,) = (line for line in said if "auto chose" in line)
    chosen = summary["stages"][1]["choice"]
    assert line.startswith(
        f"stage 2: auto chose {chosen['name']}, rope_theta {chosen['rope_theta']:,.0f}: loss "
    )
    assert f"; theta=2 +{chosen['results'][-1]['difference']:.4f}" in line
    page = write_run_report(Path(values["output"]))[0].read_text()
    assert line.removeprefix("stage 2: ") in page


def test_a_finished_run_resumed_keeps_its_choice(finished, monkeypatch):
    values, summary, _ = finished
    monkeypatch.setattr(choice, "probe_model", None)
    assert extend(recipe_of(values), resume=True)["stages"] == summary["stages"]


KILL_AT = """
import os, signal
import ropewalk.training.stage as stage
train, done = stage.train_step, []
def steps(*arguments):
    if len(done) == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(arguments)
    return train(*arguments)
stage.train_step = steps
"""


class CutOff(BaseException):
    """Stands for the end of the process: nothing may catch it."""


def cut_off(*_):
    raise CutOff


def assert_goes_on_as(finished, values):
    """The rest of a run that was cut off is that of the finished one."""
    whole, summary, _ = finished
    resumed = extend(recipe_of(values), resume=True)
    assert losses(values["output"]) == losses(whole["output"])
    assert choices(values["output"]) == choices(whole["output"])
    assert resumed["stages"] == summary["stages"]
    assert resumed["after"] == summary["after"]


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(finished, auto_values, tmp_path, monkeypatch):
    """kill -9 inside the auto stage; the choice is on disk, and the probe is never run again."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(auto_values))
    result = run_program(KILL_AT + ROPEWALK, "extend", file)
    assert result.returncode == -9, result.stderr
    monkeypatch.setattr(choice, "probe_model", None)
    assert_goes_on_as(finished, auto_values)


def test_cut_off_and_resumed_it_is_the_same_run(finished, auto_values, monkeypatch):
    """While it probes, before the stage begins and in the stage after: no probe is run again once it is on disk."""
    step, done = stage.train_step, []

    def steps(*arguments):
        if len(done) == 8:
            raise CutOff
        done.append(arguments)
        return step(*arguments)

    def begins(given, *arguments):
        return cut_off() if given.number == 1 else begin(given, *arguments)

    begin = run.run_stage
    places = [(choice, "probe_model", cut_off), (run, "run_stage", begins), (stage, "train_step", steps)]
    for number, place in enumerate(places):
        with monkeypatch.context() as patch:
            patch.setattr(*place)
            with pytest.raises(CutOff):
                extend(recipe_of(auto_values), resume=number > 0)
        assert (Path(auto_values["output"]) / "rope-choices.json").exists() == (number > 0)
        if number:
            monkeypatch.setattr(choice, "probe_model", None)
    # The stage that chooses has six steps, and two of the next one were taken.
    assert [each[:2] for each in losses(auto_values["output"])][-1] == (2, 2)
    assert_goes_on_as(finished, auto_values)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, tiny_checkpoint, tiny_documents):
    """The recipe of a run that broke off after the first checkpoint of its auto stage, and the file of its choice."""
    from ropewalk.training.checkpoint.single import WholeCheckpoints

    stage = {"context": 128, "steps": 6, "rows_per_step": 2, "learning_rate": 1e-2, "rope": "auto"}
    values = {
        "model": str(tiny_checkpoint),
        "output": str(tmp_path_factory.mktemp("interrupted") / "run"),
        "data": {"sources": [str(tiny_documents)], "validation_documents": 20},
        "stages": [{**stage, "pattern": "anchor"}],
        "checkpoints": {"every": 2, "keep": 2},
        "evaluation": {"suites": ["perplexity"], "rows": 2},
    }
    save = WholeCheckpoints.save

    def saved(*arguments):
        save(*arguments)
        raise CutOff

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WholeCheckpoints, "save", saved)
        with pytest.raises(CutOff):
            extend(recipe_of(values))
    return recipe_of(values), Path(values["output"]) / "rope-choices.json"


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_the_file_of_choices_is_a_view_that_nothing_reads(interrupted, tmp_path, monkeypatch, content):
    recipe, path = interrupted
    output = shutil.copytree(path.parent, tmp_path / "run")
    (output / path.name).unlink()
    if content is not None:
        (output / path.name).write_text(content)
    monkeypatch.setattr(choice, "probe_model", None)
    found = extend(recipe.model_copy(update={"output": str(output)}), resume=True)
    assert found["stages"][0]["choice"] == json.loads(path.read_text())[0]


def test_without_documents_held_out_the_training_rows_decide(recipe_values):
    recipe_values["stages"][0]["rope"] = {"method": "auto", "probe_rows": 3}
    recipe_values["evaluation"] = {"suites": []}
    recipe_values["data"]["validation_documents"] = 0
    summary = extend(recipe_of(recipe_values))
    chosen = summary["stages"][0]["choice"]
    assert (chosen["rows"], chosen["text"]) == (3, "training")
    assert sorted(result["name"] for result in chosen["results"]) == ["critical-dimension", "current", "ntk"]


def test_validation_sources_decide_where_they_are_given(recipe_values, tiny_documents):
    recipe_values["stages"][0]["rope"] = "auto"
    recipe_values["evaluation"] = {"suites": []}
    recipe_values["data"] = {"sources": [str(tiny_documents)], "validation_sources": [str(tiny_documents)]}
    chosen = extend(recipe_of(recipe_values))["stages"][0]["choice"]
    assert (chosen["rows"], chosen["text"]) == (4, "held-out")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-autocast"])
def test_other_precisions_choose_too(recipe_values, precision):
    recipe_values["stages"][0]["rope"] = "auto"
    recipe_values["evaluation"] = {"suites": []}
    summary = extend(recipe_of({**recipe_values, "precision": precision}))
    assert all(result["loss"] is not None for result in summary["stages"][0]["choice"]["results"])


def test_a_plan_knows_the_methods_that_nothing_is_left_to_choose_for(auto_values):
    assert [method is None for method in resolve(recipe_of(auto_values)).methods] == [False, True, True]
    auto_values["stages"][1]["rope"]["candidates"] = ["theta=5e5"]
    assert [m.rope_theta for m in resolve(recipe_of(auto_values)).methods][1:] == pytest.approx(
        [5e5, scaled_theta(5e5, 128, 256)]
    )
    auto_values["stages"][1]["rope"] = "auto"
    auto_values["stages"][2]["rope"] = {"method": "theta", "rope_theta": 7e7}
    methods = resolve(recipe_of(auto_values)).methods
    assert methods[1] is None
    assert methods[2] == Default(8, 7e7)


def test_a_run_says_which_base_it_takes_and_why(recipe_values):
    recipe = recipe_of(recipe_values)
    said = announcement(resolve(recipe))
    found = recommended_theta(1e4, 32, 128)
    assert f"stage 1: reason for this base: {found.reason}" in said
    assert any(f"theta with rope_theta {found.rope_theta:,.0f}" in line for line in said)
    recipe_values["stages"][0]["rope"] = {"method": "theta", "rope_theta": 7e7}
    recipe = recipe_of(recipe_values)
    assert not any("reason for this base" in line for line in announcement(resolve(recipe)))


def test_auto_as_a_string_and_in_full():
    text = "model: m\noutput: o\ndata: {sources: [a]}\nstages: [{context: 8k, steps: 1, rope: %s}]\n"
    short = parse_recipe(text % "auto", "x")
    assert short == parse_recipe(text % "{method: auto}", "x")
    assert parse_recipe(dump_recipe(short), "y") == short
    assert parse_recipe(text % "yarn", "x").stages[0].rope.method == "yarn"
    full = parse_recipe(text % "{method: auto, candidates: [critical-dimension, ntk, theta=5.0e6]}", "x")
    assert full.stages[0].rope.candidates == ["critical-dimension", "ntk", "theta=5.0e6"]


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ("{method: auto, candidates: [yarn]}", "yarn does not set a base"),
        (
            "{method: auto, candidates: [yarn-rcd=9]}",
            "yarn-rcd=9 does not .* set method: yarn, critical_pair: 9",
        ),
        ("{method: auto, candidates: [ntk-rcd=x]}", "'x' is not the index of a rotary pair"),
        (
            "{method: auto, candidates: [ntkk]}",
            r"stages.0.rope.candidates: .*'ntkk'.*\(also possible: current, ntk-rcd=PAIR, theta=VALUE\)",
        ),
        ("{method: auto, candidates: [theta=x]}", "theta=x is not a number"),
        ("{method: auto, candidates: []}", r"stages\.0\.rope\.candidates must not be empty$"),
        ("{method: auto, probe_rows: 0}", "probe_rows"),
        ("{method: auto, factor: 2}", "method 'auto' does not accept 'factor'"),
        ("{method: auto, rope_theta: 5.0e6}", "method 'auto' does not accept 'rope_theta'"),
        (
            "{method: yarn, candidates: [ntk]}",
            "'candidates' applies only to method 'auto', got method 'yarn'",
        ),
        ("{probe_rows: 4}", "'probe_rows' applies only to method 'auto', got method 'theta'"),
        ("{method: auto, candidate: [ntk]}", "did you mean candidates"),
        ("automatic", r"stages\.0\.rope\.method must be 'default', .* or 'auto', got 'automatic'"),
    ],
)
def test_bad_keys_of_auto_are_refused(rope, message):
    text = "model: m\noutput: o\ndata: {sources: [a]}\nstages: [{context: 8k, steps: 1, rope: %s}]\n"
    with pytest.raises(RopewalkError, match=message):
        parse_recipe(text % rope, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages.1.rope.candidates": ["schedule:lwm"], "stages.2.context": 2**21}, None),
        (
            {"stages.2.rope": {"method": "auto", "candidates": ["schedule:lwm"]}, "stages.2.context": 2**21},
            "lwm",
        ),
        ({"stages.1.rope.candidates": ["theta=0.5"]}, r"stages\.1\.rope\.candidates: .* above 1, got 0\.5"),
        ({"stages.1.rope.candidates": ["current", "theta=1e300"]}, "a base too large for float64"),
        ({"exact_rope": False}, r"stages\.1\.rope: method 'auto' .* set exact_rope: true"),
        (
            {"stages.0.rope": {"method": "yarn"}},
            r"stages\.1\.rope: method 'auto' .* the model after the previous stage is scaled by yarn; set method to",
        ),
        ({"stages.2.rope": {"method": "ntk", "factor": 2}}, "method 'ntk' accepts no factor"),
        ({"stages.2.rope": {"method": "longrope"}}, r"stages\.2\.rope: longrope needs factors"),
    ],
)
def test_what_can_be_known_before_is_refused_before(auto_values, changes, message):
    for key, value in changes.items():
        target = auto_values
        *parents, last = key.split(".")
        for part in parents:
            target = target[int(part)] if part.isdecimal() else target[part]
        target[last] = value
    if message is None:
        resolve(recipe_of(auto_values))
        return
    with pytest.raises(RopewalkError, match=message):
        resolve(recipe_of(auto_values))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_a_scaled_checkpoint_is_refused_by_name(recipe_values, tiny_checkpoint, tmp_path, capsys, scaling):
    shutil.copytree(tiny_checkpoint, tmp_path / "scaled")
    path = tmp_path / "scaled" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 1e4, **scaling}}))
    recipe_values["model"] = str(tmp_path / "scaled")
    recipe_values["stages"][0]["rope"] = "auto"
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_values))
    assert main(["extend", str(file)]) == 2
    said = capsys.readouterr().err
    assert (
        f"the checkpoint is scaled by {scaling['rope_type']}; set method to {scaling['rope_type']!r}" in said
    )
    assert not Path(recipe_values["output"]).exists()


def test_a_dynamic_checkpoint_counts_as_unscaled(recipe_values, tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint, tmp_path / "dynamic")
    path = tmp_path / "dynamic" / "config.json"
    config = json.loads(path.read_text())
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    path.write_text(json.dumps({**config, "rope_parameters": scaling}))
    recipe_values["model"] = str(tmp_path / "dynamic")
    recipe_values["stages"][0]["rope"] = {"method": "auto", "candidates": ["current"]}
    recipe_values["evaluation"] = {"suites": []}
    summary = extend(recipe_of(recipe_values))
    assert summary["stages"][0]["rope_theta"] == 1e4
    result = json.loads((Path(summary["model"]) / "config.json").read_text())
    assert result["rope_parameters"]["rope_type"] == "default"
