"""The shipped recipes: their numbers are those of their sources, and tiny models of their families train by them."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from ropewalk import RopewalkError
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.dry_run.check import check
from ropewalk.recipes import SCHEMA_LINE, RecipeHead, head_of, recipe_text, shipped_recipes
from ropewalk.search.algorithms import EvolutionSettings
from ropewalk.training import extend, load_recipe
from scripts import recipe_plans

REFERENCE = Path(__file__).parents[1] / "docs" / "recipes.md"
SHORTER = 256
"""The lengths of a recipe are divided by this for a tiny model, which then was trained for 16 or 32 tokens."""

SOURCES = {
    # arXiv:2411.13476: section 4, and the bases of its code.
    "llama-64k": [(65_536, 5e6, 2000, 8, 2e-5)],
    "llama-128k": [(131_072, 1e7, 2000, 8, 2e-5)],
    # arXiv:2405.14591, table 2: the bound of 32K tokens; steps, rows and rate are those of arXiv:2411.13476.
    "base-bound-32k": [(32_768, 6.4e5, 2000, 8, 2e-5)],
    # Model card of gradientai/Llama-3-8B-Instruct-Gradient-1048k.
    "gradient-1m": [
        (2**16, 15.3e6, 30, 32, 2e-5),
        (2**18, 207.1e6, 24, 16, 2e-5),
        (2**19, 1.06e9, 50, 16, 2e-5),
        (2**20, 2.80e9, 50, 16, 2e-5),
    ],
    # arXiv:2402.13753, section 4; factors are searched.
    "longrope-2m": [
        (131_072, None, 400, 32, 2e-5),
        (262_144, None, 600, 32, 2e-5),
        (2_097_152, None, 0, None, None),
    ],
    # princeton-nlp/ProLong, train_64K.sh and train_512K.sh: 4M and 8M tokens a step.
    "prolong-512k": [
        (65_536, 8e6, 5000, 2**22 // 2**16, 1e-5),
        (524_288, 1.28e8, 2500, 2**23 // 2**19, 5e-6),
    ],
    # arXiv:2309.12307, section 4.1, and fine-tune.py of its code; a batch of 8 on each of 8 GPUs.
    "lora-32k": [(32_768, None, 1000, 8 * 8, 2e-5)],
    # THUDM/LongAlign, scripts/llama_pack.sh: a row on each of 8 GPUs; steps and base are the recipe's own.
    "chat-64k": [(65_536, 8e6, 1000, 8, 2e-5)],
}
GRADIENTS_TOKENS = [62_914_560, 100_663_296, 419_430_400, 838_860_800]
EMBEDDED = {"demo", "longrope", "retrieval"}
FAMILIES = {"meta-llama/Llama-2-7b-hf": (4096, 1e4, 4), "meta-llama/Meta-Llama-3-8B-Instruct": (8192, 5e5, 2)}
"""Trained length, base, and heads of keys and values beside 4 of queries."""


def test_each_recipe_is_planned_for_a_machine_or_runs_on_the_embedded_model():
    recommended = {name for name, text in shipped_recipes().items() if "\n# Without training: " in text}
    assert set(shipped_recipes()) == SOURCES.keys() | recommended | EMBEDDED
    assert {case["recipe"] for case in recipe_plans.stored()} == SOURCES.keys() | recommended


HEAD = "# Model: M (0.6B, 8B). Goal: 64K tokens.\n"


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("# One thing 1.5. And another.\n", "One thing 1.5"),
        ("# One,\n# in two lines\n\n# not this\n", "One, in two lines"),
    ],
)
def test_a_head_says_model_goal_and_in_its_first_sentence_what_is_done(comment, sentence):
    found = RecipeHead("M (0.6B, 8B)", "64K tokens", sentence)
    assert head_of(f"{SCHEMA_LINE}{HEAD}{comment}model: x\n") == found


def test_a_recipe_without_model_and_goal_is_no_shipped_one():
    with pytest.raises(ValueError, match="begins with its model and goal, not with '# One thing"):
        head_of("# One thing. More.\nmodel: x\n")


@pytest.mark.parametrize("name", SOURCES)
def test_numbers_are_those_of_the_source(name):
    stages = load_recipe(name).stages
    assert len(stages) == len(SOURCES[name])
    for stage, (context, theta, steps, rows, rate) in zip(stages, SOURCES[name], strict=True):
        assert (stage.context, stage.steps) == (context, steps)
        assert theta is not None or stage.rope.limiting.method in ("longrope", "linear")
        assert theta is None or stage.rope.limiting.rope_theta == theta
        assert rows in (None, stage.rows_per_step)
        assert rate in (None, stage.learning_rate)


def test_gradients_tokens_are_those_of_its_card():
    assert [stage.tokens for stage in check(load_recipe("gradient-1m")).stages] == GRADIENTS_TOKENS


def test_longloras_adapter_and_optimizer_are_those_of_its_code():
    recipe = load_recipe("lora-32k")
    adapter, (stage,) = recipe.adapter, recipe.stages
    assert (adapter.rank, adapter.alpha, adapter.dropout) == (8, 16, 0)
    assert (adapter.targets, adapter.also_train) == (["attention"], ["embeddings", "norms"])
    assert stage.rope.limiting.factor == 32_768 / 4096
    assert (stage.warmup_steps, stage.schedule, recipe.optimizer.weight_decay) == (20, "constant", 0)
    assert (recipe.optimizer.beta1, recipe.optimizer.beta2) == (0.9, 0.95)


def test_longaligns_schedule_and_packing_are_those_of_its_scripts():
    recipe = load_recipe("chat-64k")
    (stage,) = recipe.stages
    assert stage.warmup_steps == 0.03 * stage.steps
    assert (stage.schedule, stage.min_learning_rate, stage.pattern) == ("cosine", 0, "intra_document")
    assert (recipe.optimizer.weight_decay, recipe.optimizer.beta1, recipe.optimizer.beta2) == (0, 0.9, 0.95)
    assert (recipe.data.packing, recipe.data.long_documents) == ("best_fit", "skip")
    assert {source.messages_field for source in recipe.data.sources} == {"messages"}


def test_longropes_first_two_searches_run_on_the_original_weights_and_its_last_on_the_trained_ones():
    searches = [stage.rope.limiting.search for stage in load_recipe("longrope-2m").stages]
    assert [search.weights for search in searches] == ["checkpoint", "checkpoint", "current"]
    assert {search.documents for search in searches} == {5}


def test_longropes_comment_gives_the_forward_passes_of_the_papers_search():
    paper = EvolutionSettings()
    passes = 5 * (paper.population + paper.iterations * (paper.mutations + paper.crossovers))
    assert f"budget: {passes}" in recipe_text("longrope-2m").replace("\n# ", " ")


@pytest.mark.parametrize("name", shipped_recipes())
def test_keys_in_a_comment_exist(name):
    known = set(re.findall(r"^\| `([\w.\[\]]+)` \|", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE))
    sections = {key.split(".")[0].removesuffix("[]") for key in known if "." in key}
    comments = " ".join(line for line in recipe_text(name).splitlines() if line.startswith("#"))
    named = {
        key for key in re.findall(r"\b[a-z_]+(?:\.[a-z0-9_]+)+", comments) if key.split(".")[0] in sections
    }
    assert {key for key in named if re.sub(r"\.\d+\b", "[]", key) not in known} == set()


def test_prolongs_rates_end_at_a_tenth():
    assert [
        s.min_learning_rate / s.learning_rate for s in load_recipe("prolong-512k").stages
    ] == pytest.approx([0.1, 0.1])


def test_prolongs_shares_are_those_of_its_scripts():
    shares = load_recipe("prolong-512k").data.mixture.shares
    assert sorted(shares.values()) == [0.03] * 4 + [0.04] * 2 + [0.1] * 2 + [0.3] * 2
    assert sum(shares.values()) == pytest.approx(1)
    second = load_recipe("prolong-512k").stages[1].data.mixture.shares
    assert sum(second.values()) == pytest.approx(1)
    assert second["code-512k"] == second["code"] == shares["code"] / 2
    assert second["books-512k"] == pytest.approx(shares["books"] / 6)
    for name in shares:
        assert second[name] + second.get(f"{name}-512k", 0) == pytest.approx(shares[name])


def test_gradients_stages_have_documents_of_their_own_lengths():
    recipe = load_recipe("gradient-1m")
    sources = [recipe.stage(number).data.sources[0].path for number in range(4)]
    assert sources == [f"data/documents-{length}" for length in ("64k", "256k", "512k", "1m")]
    assert [stage.moments for stage in recipe.stages[1:]] == ["reset"] * 3


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_says_what_it_is_and_is_valid(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = recipe_text(name)
    assert text.startswith("# ")
    assert name in EMBEDDED or ("# Source: " in text and "# Changed: " in text)
    check(load_recipe(name))


def test_a_name_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(RopewalkError, match="'gradient'; did you mean gradient-1m"):
        recipe_text("gradient")


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def record(number, source):
    """A document, or a chat that fits into a row."""
    text = f"{number} ropes of {source} strands. "
    if isinstance(source, dict) and source.get("messages_field"):
        answer = {"role": "assistant", "content": f"{number} ropes."}
        return {"messages": [{"role": "user", "content": text}, answer]}
    return {"text": text * 400}


def tiny_model(folder, trained, theta, kv_heads):
    """A random Llama with the demo's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=len(tokenizer),
        max_position_embeddings=trained,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_a_tiny_model_of_its_family_trains_by_it(name, tmp_path):
    values = yaml.safe_load(recipe_text(name))
    trained, theta, kv_heads = FAMILIES[values["model"]]
    tiny_model(tmp_path / "model", trained // SHORTER, theta, kv_heads)
    values |= {"model": str(tmp_path / "model"), "output": str(tmp_path / "run"), "device": "cpu"}
    values["evaluation"] = {"suites": []}
    values["data"]["workers"] = 1
    values["data"]["validation_documents"] = 8
    named = [values["data"]["sources"], values["data"].get("validation_sources", [])]
    named += [stage["data"]["sources"] for stage in values["stages"] if "data" in stage]
    if values["data"].get("validation_sources"):
        del values["data"]["validation_documents"]
    for sources in named:
        for number, source in enumerate(sources):
            spec = source if isinstance(source, dict) else {"path": source}
            path = tmp_path / f"{spec['path'].replace('/', '-')}.jsonl"
            path.write_text("".join(json.dumps(record(n, source)) + "\n" for n in range(14)))
            sources[number] = {**spec, "path": str(path)}
    for number, stage in enumerate(values["stages"]):
        stage["context"] = SOURCES[name][number][0] // SHORTER
        stage["steps"], stage["rows_per_step"] = min(stage["steps"], 1), 1
        stage.pop("warmup_steps", None)
        if "search" in stage["rope"]:
            stage["rope"]["search"] |= {"budget": 6, "documents": 2}
    if "short_context" in values:
        values["short_context"] = {"budget": 6, "documents": 2}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    result = extend(load_recipe(recipe))
    assert result.context == SOURCES[name][-1][0] // SHORTER
    assert [stage["rope_theta"] for stage in result.stages] == [
        theta if base is None else base for _, base, *_ in SOURCES[name]
    ]
    transformers.AutoModelForCausalLM.from_pretrained(result.model)
