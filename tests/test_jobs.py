"""The jobs of the package take paths, mappings and keywords, and pass settings and a run context on."""

import importlib
from pathlib import Path

import pytest

import ropewalk
from ropewalk import RopewalkError, RunContext, jobs
from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.evaluation.settings import EvaluationSettings, Settings
from ropewalk.experiments.settings import CompareSettings
from ropewalk.io.calls import keywords_of, owner_of
from ropewalk.search.settings import SearchConfig
from ropewalk.training import load_recipe

HOMES = {
    "inspect": "ropewalk.planning.inspection",
    "init": "ropewalk.dry_run.init",
    "plan": "ropewalk.dry_run.run",
    "pack": "ropewalk.data.run",
    "search": "ropewalk.search.run",
    "extend": "ropewalk.training.run",
    "evaluate": "ropewalk.evaluation.run",
    "compare": "ropewalk.experiments.run",
    "audit": "ropewalk.audit.run",
    "verify": "ropewalk.verification.run",
}


@pytest.fixture
def called(monkeypatch):
    """Call a job, and return what its room's function gets."""

    def call(name, *given, **keywords):
        own = "propose" if name == "init" else name
        monkeypatch.setattr(importlib.import_module(HOMES[name]), own, lambda *passed: passed)
        return getattr(ropewalk, name)(*given, **keywords)

    return call


def test_every_job_is_public():
    assert {name for name in jobs.JOBS if getattr(ropewalk, name, None)} == HOMES.keys()


@pytest.mark.parametrize("name", jobs.JOBS)
def test_each_setting_has_a_keyword_unless_one_of_the_same_name_is_nearer(name):
    first, kinds = jobs.JOBS[name]
    known = keywords_of(*kinds)
    assert first in known or name in ("plan", "extend")
    depths = {}
    for path in known.values():
        for field in owner_of(kinds, path).model_fields:
            depths.setdefault(field, set()).add((*path[:-1], field))
    # Which of two at the same depth a keyword means would depend on the order of their declaration.
    for field, paths in depths.items():
        least = min(map(len, paths))
        assert [len(path) for path in paths].count(least) == 1, (field, paths)


def test_evaluate_takes_a_model_and_the_settings_of_all_groups(called):
    config, context, rope_of = called(
        "evaluate", Path("model"), suites=["passkey"], lengths=["8k"], samples=20, device="cpu", out="results"
    )
    assert (
        config.model_dump()
        == EvaluationSettings(
            model="model",
            what=Settings(suites=("passkey",), lengths=(8192,), samples=20),
            loading={"device": "cpu"},
        ).model_dump()
    )
    assert (context.output, rope_of) == (Path("results"), None)


def test_evaluate_of_a_server_needs_no_model(called):
    given = {"server": "http://localhost:8000/v1", "suites": ["passkey"], "lengths": "1k"}
    config, _, _ = called("evaluate", **given)
    assert (config.model, config.serving.url, config.what.lengths) == (None, given["server"], (1024,))
    assert called("evaluate", "org/model", **given)[0].model == "org/model"


def test_evaluate_without_anything_says_what_is_missing():
    with pytest.raises(RopewalkError, match="MODEL is missing; name a checkpoint, or a server"):
        jobs.evaluate()


def test_settings_and_a_context_are_passed_on(called):
    given, context = EvaluationSettings(model="m"), RunContext(output=Path("there"))
    assert called("evaluate", given, context)[:2] == (given, context)
    assert called("evaluate", {"model": "m"}, context=context)[0] == given
    assert called("evaluate", given, samples=3)[0].what.samples == 3


def test_a_factor_table_is_applied_as_by_the_command(called):
    _, _, rope_of = called("evaluate", "embedded", rope="no-table.json")
    with pytest.raises(RopewalkError, match="no-table"):
        rope_of("embedded")


def test_plan_is_the_plan_of_a_run_on_gpus(called):
    recipe, hardware, _ = called(
        "plan", "demo", gpus=8, gpu="a100", document_length="4k", overrides={"seed": 5}
    )
    assert recipe == load_recipe("demo", ["seed=5"])
    assert hardware == HardwareSettings(gpus=8, gpu="a100", document_length=4096)
    assert called("plan", recipe, hardware)[:2] == (recipe, hardware)


def test_extend_takes_a_recipe_in_any_form(called, tmp_path):
    demo = load_recipe("demo")
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: embedded\ndata: {sources: [embedded]}\nstages: [{context: 1k, steps: 2}]\noutput: run\n"
    )
    values = {
        "model": "embedded",
        "data": {"sources": [{"path": Path("embedded")}]},
        "stages": ({"context": "1k", "steps": 2},),
        "output": "run",
    }
    for given in (file, str(file), values, load_recipe(file)):
        recipe, context, resume, from_stage = called("extend", given, overrides={"stages.0.steps": 3})
        assert recipe == load_recipe(file, ["stages.0.steps=3"])
        assert (context.output, resume, from_stage) == (None, False, None)
    assert values["stages"][0]["steps"] == 2
    assert called("extend", "demo", resume=True, from_stage=2)[0::2] == (demo, True)


def test_compare_takes_runs_one_after_the_other_or_a_recipe_with_what_varies(called):
    context = RunContext()
    for given in (("a", Path("b")), (["a", "b"],), (CompareSettings(what=("a", "b")),)):
        assert called("compare", *given, context)[0] == CompareSettings(what=("a", "b"))
    config, context = called("compare", "demo", vary={"stages.*.learning_rate": [1e-5, 2e-5]}, out="x")
    assert config == CompareSettings(what=("demo",), vary=("stages.*.learning_rate=1e-05, 2e-05",))
    assert context.output == Path("x")


def test_pack_takes_documents_one_by_one_or_together_and_writes_where_the_command_does(called):
    config, context = called("pack", "a.jsonl", tokenizer="embedded", length=256, chunk_min=8)
    assert [source.path for source in config.sources] == ["a.jsonl"]
    assert (config.rows.context, config.rows.interleave.min_length) == (256, 8)
    assert context.output == Path("packed")
    several = ["a", Path("b"), {"path": "c", "name": "n"}]
    config, context = called(
        "pack", several, RunContext(output=Path("there")), tokenizer="embedded", length="1k"
    )
    assert [(each.path, each.name) for each in config.sources] == [("a", None), ("b", None), ("c", "n")]
    assert context.output == Path("there")


def test_search_audit_inspect_and_verify_take_keywords(called):
    config, _ = called("search", "m", to="32k", budget=9, start_tokens="search")
    assert config == SearchConfig(
        model="m", target_length=32768, settings={"budget": 9, "start_tokens": "search"}
    )
    # As the command does: a choice that would cover the whole length is left out.
    assert called("search", "m", to=4, start_tokens=[0, 4])[0].settings.start_tokens == (0,)
    config, context = called("audit", shifts=[0, "1k"], dtypes="bfloat16", device="cpu")
    assert (config.model, config.shifts, config.dtypes) == ("embedded", (0, 1024), ("bfloat16",))
    assert context.device == "cpu"
    assert called("audit", "m", RunContext(device="cpu"))[1].device == "cpu"
    assert called("inspect", "m", target="128k")[0].target == 131072
    assert called("init", "m", target="128k", documents="a", gpus=8)[0].documents == ("a",)
    config, _ = called("verify", "demo", length="4k", overrides="seed=1")
    assert (config.recipe, config.length, config.overrides) == ("demo", 4096, ("seed=1",))


@pytest.mark.parametrize(
    ("name", "field"), [("inspect", "target"), ("init", "target"), ("search", "target_length")]
)
def test_the_target_may_be_the_second_argument(called, name, field):
    config, context = called(name, "m", "128K")
    assert (getattr(config, field), context.output) == (131072, None)
    assert getattr(called(name, "m", 4096)[0], field) == 4096
    own = RunContext(output=Path("x"))
    assert called(name, "m", own, **{field: 4096})[1] == own
    with pytest.raises(RopewalkError, match=rf"^{field} is given twice, as '1k' and 4096$"):
        called(name, "m", "1k", **{field: 4096})
    with pytest.raises(RopewalkError, match=rf"^{field}: 'long' is not a length"):
        called(name, "m", "long")


@pytest.mark.parametrize(
    ("name", "given", "keywords", "sentence"),
    [
        ("evaluate", ("m",), {"samples": "many"}, "samples must be a whole number, got 'many'"),
        ("evaluate", (5,), {}, "model must be a string, got 5"),
        ("evaluate", ("m",), {"context": "8k"}, "context must be a RunContext, got '8k'"),
        ("evaluate", ("m",), {"server_model": "x"}, "url is missing"),
        ("pack", ("d",), {"tokenizer": "embedded"}, "length is missing"),
        ("inspect", ("m",), {"target_length": "32k"}, "unknown keyword target_length; did you mean target?"),
        ("search", ("m",), {"target": "32k"}, "unknown keyword target; did you mean target_length?"),
        ("extend", (5,), {}, "a recipe must be a file, the name of a shipped recipe, a mapping or a Recipe, not int"),
        ("extend", ("demo",), {"resume": "yes"}, "resume must be true or false, got 'yes'"),
        ("extend", ({"model": 3, "data": 1, "output": "x"},), {}, "recipe: model must be a string, got 3"),
        ("plan", ("demo",), {"gpu": "h1000"}, "gpu: unknown GPU 'h1000'; choose from h100, h200"),
        ("compare", (), {}, "what must name a recipe, or two or more finished runs"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence(name, given, keywords, sentence):
    with pytest.raises(RopewalkError) as raised:
        getattr(ropewalk, name)(*given, **keywords)
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_the_rooms_that_are_called_take_the_same():
    import ropewalk.audit
    import ropewalk.search

    for room in (ropewalk.search, ropewalk.audit):
        with pytest.raises(RopewalkError, match="seed must be a whole number, got 'x'"):
            room("embedded", to="1k", seed="x") if room is ropewalk.search else room("embedded", seed="x")


def test_what_a_person_tries_first_runs():
    found = ropewalk.inspect("embedded", target="1k")
    assert found.to_json()["trained_length"] < 1024
    result = ropewalk.evaluate("embedded", suites="passkey", lengths=[128], samples=2)
    assert [(each.task, each.length, each.n) for each in result.results] == [("passkey", 128, 2)]
    frame = result.to_frame()
    assert (frame["task"][0], frame["value"][0]) == ("passkey", result.results[0].score)
    assert "passkey" in repr(result).splitlines()[2]
