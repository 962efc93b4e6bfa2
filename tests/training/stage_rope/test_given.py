"""Where a longrope stage has its factors from, and what of it is refused before the work starts."""

import json
import math
from pathlib import Path

import pytest
import yaml

from ropewalk import RopewalkError
from ropewalk.cli.app import main
from ropewalk.rope import Default, LongRope
from ropewalk.search.factor_table import Factors, write_factors
from ropewalk.search.settings import SearchSettings
from ropewalk.training.preflight import resolve
from ropewalk.training.recipe.file import dump_recipe, load_recipe, parse_recipe
from ropewalk.training.recipe.rope import Search, ShortContext
from ropewalk.training.stage_rope.given import with_tables
from tests.training.run_cases import extend

ORIGINAL, PAIRS = 32, 4
LONG = (1.0, 1.5, 2.25, 4.0)


def recipe_of(values):
    return parse_recipe(yaml.safe_dump(values), "test")


def table(path, length=128, **changed):
    """A factor table for the tiny checkpoint, on the disk."""
    own = {"rotary_dim": 2 * PAIRS, "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
    values = {
        "model": {"name": "tiny", **own, **changed.pop("model", {})},
        "target_length": length,
        "long_factor": LONG,
        "attention_factor": 1.25,
        "provenance": {"kind": "csv", "source": "by hand"},
        **changed,
    }
    write_factors(path, Factors.model_validate(values))
    return str(path)


@pytest.fixture
def longrope_values(recipe_values):
    """A recipe of one longrope stage, without its factors."""
    recipe_values["stages"][0] |= {"rope": {"method": "longrope"}, "steps": 1, "pattern": "full"}
    recipe_values["evaluation"] = {"suites": []}
    return recipe_values


def with_rope(values, **rope):
    stage = {**values["stages"][0], "rope": {"method": "longrope", **rope}}
    return {**values, "stages": [stage, *values["stages"][1:]]}


def method_of(values):
    (method,) = resolve(recipe_of(values)).methods
    return method


def published(length):
    return math.sqrt(1 + math.log(length / ORIGINAL) / math.log(ORIGINAL))


def test_short_factors_that_are_left_out_are_1s_or_those_of_the_checkpoint(longrope_values):
    ones = method_of(with_rope(longrope_values, long_factor=list(LONG)))
    assert ones == LongRope(2 * PAIRS, 1e4, (1.0,) * PAIRS, LONG, published(128), ORIGINAL)
    short = [1.0, 1.0, 1.1, 1.2]
    longrope_values["stages"].append({**longrope_values["stages"][0], "context": 256})
    values = with_rope(longrope_values, long_factor=list(LONG), short_factor=short)
    values["stages"][1]["rope"] = {"method": "longrope", "long_factor": [8.0] * PAIRS}
    methods = resolve(recipe_of(values)).methods
    assert methods[0].short_factor == methods[1].short_factor == tuple(short)
    assert methods[1].attention_factor == pytest.approx(published(256), rel=1e-12)
    assert methods[1].original_max_position_embeddings == ORIGINAL


def test_a_table_gives_a_stage_its_factors_and_its_attention_factor(longrope_values, tmp_path):
    path = table(tmp_path / "f.json", 200, short_factor=(1.0, 1.0, 1.0, 1.125))
    method = method_of(with_rope(longrope_values, factors=path))
    assert (method.long_factor, method.short_factor) == (LONG, (1.0, 1.0, 1.0, 1.125))
    assert method.attention_factor == 1.25
    assert method_of(with_rope(longrope_values, factors=path, attention_factor=1.5)).attention_factor == 1.5


def test_a_table_trains_as_its_numbers_do_and_is_kept_for_the_resumed_run(longrope_values, tmp_path):
    path = table(tmp_path / "f.json")
    losses = []
    for name, rope in (
        ("table", {"factors": path}),
        ("numbers", {"long_factor": list(LONG), "attention_factor": 1.25}),
    ):
        values = {**with_rope(longrope_values, **rope), "output": str(tmp_path / name)}
        summary = extend(recipe_of(values))
        losses.append(json.loads((tmp_path / name / "metrics.jsonl").read_text())["loss"])
        config = json.loads((Path(summary["model"]) / "config.json").read_text())
        assert tuple(config["rope_parameters"]["long_factor"]) == LONG
    assert losses[0] == losses[1]
    kept = tmp_path / "table" / "factors-stage1.json"
    assert kept.read_text() == Path(path).read_text()
    table(tmp_path / "f.json", attention_factor=1.3)
    # Refused before the results of the run make room for those of another step.
    longrope_values["stages"][0]["steps"] = 2
    values = {**with_rope(longrope_values, factors=path), "output": str(tmp_path / "table")}
    with pytest.raises(
        RopewalkError, match=r"stages\.0\.rope\.attention_factor \(1\.25 in the folder, 1\.3 given\).*restore"
    ):
        extend(recipe_of(values), resume=True)
    assert (tmp_path / "table" / "model").is_dir()
    assert not (tmp_path / "table" / "earlier").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"start_tokens": 4},
            r"f\.json has start_tokens 4, which a transformers config cannot store.*start-tokens 0",
        ),
        ({"target_length": 127}, r"f\.json is for 127 tokens, but the stage has a context of 128"),
        ({"model": {"rope_theta": 5e5}}, "rope_theta 500000, but this model has rope_theta 10000"),
        ({"model": {"original_max_position_embeddings": 64}}, "original_max_position_embeddings 64"),
        ({"model": {"rotary_dim": 2}, "long_factor": (1.0,)}, "rotary_dim 2, but"),
        ({"long_factor": None, "short_factor": LONG}, "only short factors"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(longrope_values, tmp_path, changed, message):
    path = table(tmp_path / "f.json", **{"length": changed.pop("target_length", 128), **changed})
    with pytest.raises(RopewalkError, match=message):
        resolve(recipe_of(with_rope(longrope_values, factors=path)))


def test_a_table_of_another_checkpoint_is_remarked_on(longrope_values, tmp_path):
    from ropewalk.models.checkpoint.digest import model_digest
    from ropewalk.training.preflight import announcement

    path = tmp_path / "f.json"
    recipe = recipe_of(with_rope(longrope_values, factors=str(path)))
    said = []
    for digest in ("0" * 64, model_digest(longrope_values["model"]), None):
        table(path, model={"digest": digest})
        said.append([line for line in announcement(resolve(recipe)) if "another checkpoint" in line])
    assert [len(lines) for lines in said] == [1, 0, 0]
    assert "f.json were found on another checkpoint (tiny)" in said[0][0]


def test_the_shipped_recipe_is_the_papers_order():
    recipe = load_recipe("longrope")
    searches = [stage.rope.search.weights for stage in recipe.stages]
    assert searches == ["checkpoint", "checkpoint", "current"]
    assert [stage.steps > 0 for stage in recipe.stages] == [True, True, False]
    assert recipe.short_context is not None
    assert resolve(recipe).original_length == 256


def test_the_defaults_are_those_of_the_search_itself():
    for settings in (Search(), ShortContext()):
        assert (settings.budget, settings.documents) == (SearchSettings().budget, SearchSettings().documents)


BASE = "model: m\noutput: o\ndata: {sources: [a]}\nstages: [{context: 8k, steps: 1, rope: %s}]\n"


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ("{method: longrope, factors: f.json, search: {}}", "give only one of 'factors' and 'search'"),
        ("{method: longrope, long_factor: [1.0], search: {}}", "give only one of 'long_factor' and 'search'"),
        (
            "{method: longrope, short_factor: [1.0], factors: f.json}",
            "give only one of 'short_factor' and 'factors'",
        ),
        ("{method: yarn, search: {}}", "'search' applies only to method 'longrope', got method 'yarn'"),
        (
            "{method: theta, factors: f.json}",
            "'factors' applies only to method 'longrope', got method 'theta'",
        ),
        ("{method: auto, search: {}}", "method 'auto' does not accept 'search'"),
        (
            "{method: longrope, search: {algorithm: annealing}}",
            "algorithm 'annealing'; choose from cma-es, evolution",
        ),
        (
            "{method: longrope, search: {budget: 14}}",
            "a budget of 14 forward passes is too small for the 3 initial candidates .*to 15 or more",
        ),
        ("{method: longrope, search: {budget: 29, short_penalty: 1}}", "budget of 29 .*to 30 or more"),
        ("{method: longrope, search: {largest: 0.5}}", "largest"),
        ("{method: longrope, search: {documents: 0}}", "documents"),
        ("{method: longrope, search: {weights: latest}}", "weights"),
        ("{method: longrope, search: {budgte: 3}}", "did you mean budget"),
    ],
)
def test_bad_keys_of_a_search_are_refused(rope, message):
    with pytest.raises(RopewalkError, match=message):
        parse_recipe(BASE % rope, "x")


def test_a_recipe_with_a_search_survives_being_written_out():
    text = BASE % "{method: longrope, search: {budget: 50, weights: checkpoint}}" + "short_context: {}\n"
    recipe = parse_recipe(text, "x")
    assert parse_recipe(dump_recipe(recipe), "y") == recipe
    assert recipe.stages[0].rope.search.budget == 50


@pytest.mark.parametrize("method", ["theta", "yarn", "auto", "default"])
def test_a_stage_of_no_steps_is_for_longrope_alone(method):
    with pytest.raises(
        RopewalkError,
        match=f"steps 0 is allowed only for longrope stages, .* set steps to 1 or more for rope '{method}'",
    ):
        parse_recipe((BASE % method).replace("steps: 1", "steps: 0"), "x")


def test_short_factors_need_a_last_stage_of_longrope():
    with pytest.raises(RopewalkError, match=r"short_context .*the last stage's rope is 'theta'"):
        parse_recipe(BASE % "theta" + "short_context: {}\n", "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            r"stages\.0\.rope: longrope needs factors; set either long_factor .*, factors .*, or search: {}",
        ),
        ({"exact_rope": False, "rope": {"search": {}}}, r"stages\.0\.rope: a search .*exact_rope: true"),
        (
            {"exact_rope": False, "rope": {"long_factor": LONG}, "short_context": {}},
            "short_context needs .*exact_rope",
        ),
        ({"rope": {"search": {}, "start_tokens": 4}}, "cannot store start_tokens 4"),
        ({"rope": {"search": {}}, "positions": "reset"}, "longrope would select factors"),
        ({"rope": {"factors": "missing.json"}}, r"cannot read missing\.json: No such file"),
        ({"rope": {"long_factor": LONG, "attention_factor": 0.0}}, "attention_factor"),
    ],
)
def test_what_can_be_known_before_is_refused_before(longrope_values, changes, message):
    rope = {key: list(v) if isinstance(v, tuple) else v for key, v in changes.pop("rope", {}).items()}
    values = with_rope(longrope_values, **rope)
    values["stages"][0] |= {key: changes.pop(key) for key in ("positions",) if key in changes}
    with pytest.raises(RopewalkError, match=message):
        resolve(recipe_of({**values, **changes}))


def search_stages(values, *ropes):
    stage = values["stages"][0]
    contexts = (64, 128, 256)
    stages = [{**stage, "context": c, "rope": rope} for c, rope in zip(contexts, ropes, strict=False)]
    return recipe_of({**values, "stages": stages})


def test_a_search_on_top_of_other_scalings_is_refused(longrope_values):
    search = {"method": "longrope", "search": {}}
    with pytest.raises(RopewalkError, match=r"stages\.1\.rope\.search: the checkpoint uses yarn scaling"):
        resolve(search_stages(longrope_values, "yarn", search))
    of_model = {"method": "longrope", "search": {"weights": "checkpoint"}}
    with pytest.raises(RopewalkError, match=r"stages\.1\.rope\.search\.weights: .* set weights: current"):
        resolve(search_stages(longrope_values, "theta", of_model))
    # A new base and then factors on top of it: relative to the new base, from the new length on.
    assert resolve(search_stages(longrope_values, "theta", search)).methods[1] is None
    assert resolve(search_stages(longrope_values, "auto", search, search)).original_length == 64


def test_a_search_with_too_few_documents_is_refused_before_anything_is_trained(longrope_values):
    values = with_rope(longrope_values, search={"documents": 50, "budget": 150})
    with pytest.raises(
        RopewalkError,
        match=r"stage 1: the text fills .* needs 50 rows .*for more, raise data\.validation_documents",
    ):
        extend(recipe_of(values))
    assert not (Path(values["output"]) / "recipe.yaml").exists()
    values = with_rope(longrope_values, search={"documents": 1}, attention_factor=1.1)
    values["short_context"] = {"documents": 60, "budget": 180}
    with pytest.raises(RopewalkError, match="the short factors: the text fills"):
        extend(recipe_of(values))
    values["data"] = {**values["data"], "validation_documents": 0}
    with pytest.raises(
        RopewalkError, match="the short factors: the search needs held-out documents, but there are none"
    ):
        extend(recipe_of(values))


def test_each_table_goes_to_the_stage_of_its_length(longrope_values, tmp_path):
    recipe = search_stages(longrope_values, "theta", "theta", "theta")
    paths = [table(tmp_path / f"{length}.json", length) for length in (256, 64)]
    found = with_tables(recipe, paths)
    assert [stage.rope.factors for stage in found.stages] == [paths[1], None, paths[0]]
    assert [stage.rope.method for stage in found.stages] == ["longrope", "theta", "longrope"]
    # Nothing else of a stage is changed.
    assert [stage.model_dump(exclude={"rope"}) for stage in found.stages] == [
        stage.model_dump(exclude={"rope"}) for stage in recipe.stages
    ]
    assert with_tables(recipe, []) == recipe
    one = search_stages(longrope_values, "theta")
    assert with_tables(one, paths[:1]).stages[0].rope.factors == paths[0]


@pytest.mark.parametrize(
    ("lengths", "contexts", "message"),
    [
        ([100], (64, 128), r"100 tokens, but the stages have contexts of 64 and 128 tokens"),
        ([256], (64, 128), "256 tokens, but the stages have contexts of 64 and 128 tokens"),
        ([63], (64,), "63 tokens, but the stages have contexts of 64 tokens"),
        ([64, 64], (64, 128), "both for 64 tokens, but stage 1 takes only one"),
        ([64, 128], (64,), "128 tokens, but the stages have contexts of 64 tokens"),
        ([64], (64, 64), "64 tokens, but 2 stages have this context; in the recipe, give the table"),
    ],
)
def test_a_table_without_a_stage_of_its_own_is_refused(longrope_values, tmp_path, lengths, contexts, message):
    stages = [{**longrope_values["stages"][0], "context": context, "rope": "theta"} for context in contexts]
    paths = [table(tmp_path / f"{i}.json", length) for i, length in enumerate(lengths)]
    with pytest.raises(RopewalkError, match=message):
        with_tables(recipe_of({**longrope_values, "stages": stages}), paths)


@pytest.mark.slow
def test_the_command_takes_tables_and_resumes_with_them(longrope_values, tmp_path, capsys):
    file, path = tmp_path / "recipe.yaml", table(tmp_path / "f.json")
    file.write_text(yaml.safe_dump(longrope_values))
    assert main(["extend", str(file), "--rope", path, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["stages"][0]["long_factor"] == list(LONG)
    assert (
        parse_recipe((tmp_path / "run" / "recipe.yaml").read_text(), "saved").stages[0].rope.factors == path
    )
    assert main(["extend", str(file), "--rope", path, "--resume"]) == 0
    assert main(["extend", str(file), "--resume"]) == 2
    assert f"started with stages.0.rope.factors {path}, but the recipe has none" in capsys.readouterr().err
    assert main(["extend", str(file), "--set", "output=" + str(tmp_path / "b")]) == 2
    assert "longrope needs factors" in capsys.readouterr().err
    assert main(["extend", str(file), "--rope", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


def test_verify_takes_a_recipe_that_is_to_search(longrope_values, tmp_path):
    from ropewalk.verification.case import prepare

    values = with_rope(longrope_values, search={"documents": 1})
    case, remarks, _ = prepare(recipe_of(values), tmp_path, rows=2)
    assert any("searched during the run" in remark for remark in remarks)
    assert isinstance(case.rope, LongRope)
    # NTK's factors, a power law from 1 to the ratio of lengths.
    assert case.rope.long_factor == tuple(round(4 ** (i / 3), 2) for i in range(PAIRS))
    assert resolve(recipe_of(values)).rope == Default(2 * PAIRS, 1e4)
