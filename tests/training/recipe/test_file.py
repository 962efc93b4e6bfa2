"""Recipes: what is read, what is refused, and in which words."""

import pytest
import yaml

from ropewalk import RopewalkError
from ropewalk.training.recipe.file import dump_recipe, load_recipe, parse_recipe
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.recipe.stage import Parallel

MINIMAL = """
model: some/model
output: runs/x
data: {sources: [a.jsonl, {path: b, name: books}]}
stages: [{context: 8k, steps: 10}, {context: 32k, steps: 5, rope: {method: yarn}}]
"""


def test_a_dumped_recipe_reads_back_the_same():
    recipe = parse_recipe(MINIMAL, "x")
    assert parse_recipe(dump_recipe(recipe), "y") == recipe


def test_set_reaches_into_lists_and_makes_missing_tables():
    recipe = parse_recipe(MINIMAL, "x", ["stages.1.steps=7", "optimizer.weight_decay=0", "output=runs/y"])
    assert recipe.stages[1].steps == 7
    assert recipe.optimizer.weight_decay == 0
    assert recipe.output == "runs/y"


def test_keys_take_the_place_of_auto_and_null():
    text = f"{MINIMAL}parallel: auto\nadapter: null\n"
    given = ["parallel.sequence=8", "parallel.ring=2", "stages.1.parallel=auto", "stages.1.parallel.shard=4"]
    recipe = parse_recipe(text, "x", [*given, "adapter.rank=4"])
    assert recipe.parallel == Parallel(sequence=8, ring=2)
    assert recipe.stages[1].parallel == Parallel(shard=4)
    assert recipe.adapter.rank == 4
    # What a recipe writes out has auto too.
    assert load_recipe(parse_recipe(MINIMAL, "x"), ["parallel.sequence=8"]).parallel.sequence == 8
    with pytest.raises(RopewalkError, match="output is a value and has no keys"):
        parse_recipe(text, "x", ["output.x=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.0.contxt=4k", r"unknown key stages\.0\.contxt; did you mean context\?"),
        ("optimiser.beta1=0.9", r"unknown key optimiser; did you mean optimizer\?"),
        ("data.sources.1.nmae=x", r"unknown key data\.sources\.1\.nmae; did you mean name\?"),
        ("stages.0.rope.thta=1", r"unknown key stages\.0\.rope\.thta; known keys are .*rope_theta"),
        ("stages.0.steps=1:30", r"stages\.0\.steps must be a whole number, got '1:30'"),
        ("stages.0.steps=true", r"stages\.0\.steps must be a whole number, got True"),
        ("stages.0.steps=-1", r"stages\.0\.steps must be 0 or more, got -1"),
        ("stages.0.pattern=causal", r"unknown stages\.0\.pattern 'causal'; choose from .*anchor"),
        ("stages.0.context=8x", r"stages\.0\.context: '8x' is not a length"),
        ("stages.1.context=4k", r"stages\.1\.context 4096 is less than stages\.0\.context 8192"),
        ("stages.0.rows_per_batch=3", "rows_per_step must be a positive multiple of rows_per_batch 3, got 8"),
        ("stages.0.warmup_steps=11", "warmup_steps 11 is more than steps 10"),
        ("stages.2.steps=1", "there is no entry 2; the list has 2 entries"),
        ("stages.0.learning_rate=.inf", "learning_rate"),
        ("seed=12345678901234567890", "seed"),
        (f"stages.0.steps={'9' * 330}", r"stages\.0\.steps must be 1000000000 or less, got 999"),
        (
            f"stages.0.rows_per_step={'9' * 330}",
            r"stages\.0\.rows_per_step must be 1000000000 or less",
        ),
        ("stages.0.context=99999999999999999999", r"stages\.0\.context must be 2147483648 or less"),
        ("stages.0.context=999999999M", r"stages\.0\.context must be 2147483648 or less"),
        (
            "evaluation.lengths=[99999999999999999999]",
            r"evaluation\.lengths\.0 must be 2147483648 or less",
        ),
        ("evaluation.rows=1000000001", r"evaluation\.rows must be 1000000000 or less"),
        ("evaluation.lengths=[1e400]", r"evaluation\.lengths\.0: "),
        ("output=''", "output must not be empty"),
        ("model=''", "model must not be empty"),
        ("steps", "--set needs key=value, got 'steps'"),
        ("seed.x=1", "unknown key seed.x|there is no key|seed"),
    ],
)
def test_bad_keys_and_values_are_refused_in_one_sentence(override, message):
    with pytest.raises(RopewalkError, match=message) as caught:
        parse_recipe(MINIMAL, "x", [override])
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named():
    with pytest.raises(RopewalkError, match="output is missing"):
        parse_recipe("model: m\ndata: {sources: [a]}\nstages: [{context: 8k, steps: 1}]\n", "x")


def bomb(form, first):
    """Ten aliases of ten aliases of ten..."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} {form.format(','.join([f'*a{n - 1}'] * 10))}" for n in range(1, 12)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is not YAML"),
        (b"- 1", "must be a mapping"),
        (b"seed: 1\nseed: 2", "the key seed occurs twice, the second time in line 2"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"!!python/object/apply:os.getcwd []", "is not YAML"),
        (b"? [a, b]\n: 1", "the key in line 1 is a list or a mapping; a key must be a string"),
        (b"seed: 1\n? {a: b}\n: 1", "the key in line 2 is a list or a mapping"),
        (b"a: " + b"[" * 5000, "is nested too deeply"),
        (b"{a: " * 5000, "is nested too deeply"),
        (b"- " * 5000, "is nested too deeply"),
        (b"a: &a [*a]", "the alias in line 1 refers to a value that contains this alias"),
        (
            bomb("[{}]", "[x]"),
            "with all aliases expanded, there are more than 100,000 values; use fewer aliases",
        ),
        (bomb("{{<<: [{}]}}", "{k: v}"), "there are more than 100,000 values"),
        (
            b"seed: 2024-13-45",
            "the value '2024-13-45' in line 1 is not a valid timestamp; if the value is text",
        ),
        (b"seed: " + b"1" * 5000, "the value '1{60}' in line 1 is not a valid int"),
        (b"a: 1\nseed: !!int ''", "the value '' in line 2 is not a valid int"),
        (b"seed: !!bool x", "the value 'x' in line 1 is not a valid bool"),
        (b"seed: !!timestamp x", "the value 'x' in line 1 is not a valid timestamp"),
        (b"seed: !!binary x", "is not YAML: line 1, column 7: failed to decode base64"),
        (b'output: "a\\0b"', "the text .* in line 1 contains a NUL character or an unpaired surrogate"),
        (b'output: "\\ud800"', "the text .* in line 1 contains a NUL character or an unpaired surrogate"),
    ],
)
def test_files_that_are_no_recipes(tmp_path, content, message):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(RopewalkError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("? [a, b]", "a key must be a string"),
        ("[" * 5000, "is nested too deeply"),
        ("&a [*a]", "refers to a value that contains this alias"),
        ("{a: 1, a: 2}", "the key a occurs twice"),
        ("2024-13-45", "is not a valid timestamp"),
        ("1" * 5000, "is not a valid int"),
        ("[", "is not YAML"),
    ],
)
def test_values_for_set_are_read_as_strictly(value, message):
    with pytest.raises(RopewalkError, match=message) as caught:
        parse_recipe(MINIMAL, "x", [f"seed={value}"])
    assert str(caught.value).startswith("the value of --set seed")


def test_an_alias_that_repeats_a_little_is_welcome():
    text = MINIMAL.replace("stages:", "optimizer: &o {beta1: 0.8}\nstages:") + "\n"
    assert parse_recipe(text, "x").optimizer.beta1 == 0.8
    shared = "model: m\noutput: o\ndata: {sources: [a]}\nstages: [&s {context: 8k, steps: 1}, *s]\n"
    assert [stage.context for stage in parse_recipe(shared, "x").stages] == [8192, 8192]


def test_one_value_in_the_place_of_a_list_says_how_to_write_it():
    with pytest.raises(RopewalkError, match=r"trackers must be a list, got 'wandb'; write \[wandb\]$"):
        load_recipe("demo", ["trackers=wandb"])
    assert load_recipe("demo", ["trackers=[wandb]"]).trackers == ["wandb"]


def test_a_missing_recipe_lists_the_shipped_ones(tmp_path):
    with pytest.raises(
        RopewalkError, match=r"no recipe file dmo; give a file or one of the shipped recipes: .*demo"
    ):
        load_recipe("dmo")
    with pytest.raises(RopewalkError, match=r"embedded is a model and no recipe; .* is demo"):
        load_recipe("embedded")
    with pytest.raises(RopewalkError, match="cannot read recipe"):
        load_recipe(tmp_path / "missing.yaml")


def test_a_folder_named_like_a_shipped_recipe_is_not_it(tmp_path, monkeypatch):
    """The demo's own output folder is called demo."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_recipe("demo").model == "embedded"


def test_shipped_recipes_are_valid():
    from importlib import resources

    names = [f.name for f in resources.files("ropewalk.recipes").iterdir() if f.name.endswith(".yaml")]
    assert "demo.yaml" in names
    for name in names:
        assert isinstance(load_recipe(name.removesuffix(".yaml")), Recipe)
        text = resources.files("ropewalk.recipes").joinpath(name).read_text()
        assert yaml.safe_load(text)["model"]
