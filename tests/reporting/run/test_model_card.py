"""The card of a model says what its run says, can be read by the Hub, and never replaces anybody's own."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from huggingface_hub import ModelCard

from ropewalk.evaluation.results import SAMPLES
from ropewalk.models.checkpoint.card import is_own_card
from ropewalk.models.config.layers import INDEXERS_SINCE
from ropewalk.reporting.run import training
from ropewalk.reporting.run.model_card import run_card, write_model_card
from ropewalk.training.folder import RECIPE, SUMMARY
from ropewalk.training.recipe.file import dump_recipe, parse_recipe
from tests.places import ROOT
from tests.reporting.reporting_cases import AFTER, BEFORE, passkey
from tests.training.tiny import INDEXED
from tests.versions import needs_transformers


def with_samples(right: int) -> dict:
    samples = [{"index": i, "score": 100.0 * (i < right)} for i in range(20)]
    return {**passkey(1024, right).to_json(), "samples": samples, "details": {SAMPLES: "same"}}


SOURCE = {
    "name": "meta-llama/Llama-3.1-8B",
    "hub_id": "meta-llama/Llama-3.1-8B",
    "revision": "0e9e39f",
    "card": {"license": "llama3.1", "language": ["en"]},
    "sha256": "ab" * 32,
    "rope": {"method": "llama3", "rope_theta": 500000.0, "factor": 8.0},
}
STAGE = {
    "context": 1024,
    "method": "theta",
    "rope_theta": 8e6,
    "pattern": "anchor",
    "steps": 60,
    "tokens": 491_520,
    "mixture": None,
}
SUMMARY_VALUES = {
    "trained_length": 256,
    "context": 1024,
    "precision": "bfloat16",
    "stages": [STAGE],
    "before": [BEFORE.to_json(), with_samples(1)],
    "after": [AFTER.to_json(), with_samples(19)],
    "versions": {"ropewalk": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    "source": SOURCE,
}
RECIPE_VALUES = """\
model: meta-llama/Llama-3.1-8B
output: {output}
data: {{sources: ["hf:togethercomputer/Long-Data:en@train", /home/someone/secret/books.jsonl]}}
stages: [{{context: 1024, rope: theta, steps: 60, rows_per_step: 8, learning_rate: 2.0e-5}}]
"""


def recipe(output="run"):
    return parse_recipe(RECIPE_VALUES.format(output=output), "recipe.yaml")


def card(**changes):
    return run_card({**copy.deepcopy(SUMMARY_VALUES), **changes}, recipe(), ["vLLM reads it"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    config = ROOT / "src" / "ropewalk" / "data" / "demo_model" / "config.json"
    (tmp_path / "model" / "config.json").write_text(config.read_text())
    (tmp_path / SUMMARY).write_text(json.dumps(SUMMARY_VALUES))
    (tmp_path / RECIPE).write_text(dump_recipe(recipe(str(tmp_path))))
    return tmp_path


def test_the_hub_reads_its_metadata():
    data = ModelCard(card()).data
    assert data.base_model == "meta-llama/Llama-3.1-8B"
    assert data.datasets == ["togethercomputer/Long-Data"]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.license, data.language) == ("llama3.1", ["en"])
    assert data.to_dict()["base_model_relation"] == "finetune"
    assert "long-context" in data.tags


def test_what_is_not_known_is_left_out():
    unknown = {**SOURCE, "name": "mine", "hub_id": None, "revision": None, "card": {}}
    data = ModelCard(card(source=unknown)).data.to_dict()
    assert data.keys() == {"datasets", "library_name", "pipeline_tag", "tags"}
    assert "The licence of the source model is not known" in card(source=unknown)


def test_it_says_what_was_trained_and_measured():
    text = card()
    for part in (
        "# meta-llama/Llama-3.1-8B for 1,024 tokens",
        "rose from 5.0 % to 95.0 % (+90.0 points, 95 % interval ",
        "[meta-llama/Llama-3.1-8B](https://huggingface.co/meta-llama/Llama-3.1-8B) (revision 0e9e39f)",
        "| RoPE | llama3, base 500,000, factor 8 | theta, base 8,000,000 |",
        "| 1 | 1,024 | theta, base 8,000,000 | anchor | 60 | 491,520 | 2e-05 |",
        "- Precision: bfloat16",
        "| perplexity | 2,048 | 16 | 32,000 | 3.21 | 3.04 to 3.37 | 2.49 | 2.36 to 2.61 |",
        "| passkey | 1,024 | 20 | – | 5.0 % | 0.9 to 23.6 % | 95.0 % | 76.4 to 99.1 % |",
        "| passkey | 1,024 | 20 | 5.0 | 95.0 | +90.0 |",
        "- sig.: significant, p below 0.05 after Holm's correction",
        "vllm serve path/to/this/folder --max-model-len 1024",
        "- vLLM reads it",
    ):
        assert part in text
    assert "vllm serve me/mine --" in run_card(SUMMARY_VALUES, recipe(), [], "me/mine")


def test_chosen_special_tokens_are_said():
    chosen = parse_recipe(
        RECIPE_VALUES.format(output="run").replace("data: {", 'data: {eos_token: "<|endoftext|>", ', 1),
        "recipe.yaml",
    )
    text = run_card(copy.deepcopy(SUMMARY_VALUES), chosen, ["vLLM reads it"])
    assert "- Special tokens of the training data: eos\\_token \\<\\|endoftext\\|\\>" in text
    assert "Special tokens" not in card()


def test_it_tells_nothing_about_this_machine():
    assert "someone" not in card()
    assert "books.jsonl" in card()


def test_no_name_is_taken_for_markdown_or_html():
    evil = "x<img src=a onerror=b> | [a](javascript:b) `c`\n# d\u202e"
    text = card(source={**SOURCE, "name": evil, "hub_id": None}, stages=[{**STAGE, "pattern": evil}])
    assert "<img" not in text.replace(r"\<img", "")
    assert "\n# d" not in text
    assert "\u202e" not in text
    header, row = (line for line in text.splitlines() if line.startswith(("| stage", "| 1 |")))
    assert row.replace(r"\|", "").count("|") == header.count("|")


def test_the_card_is_there_before_the_page_that_tells_that_a_run_is_complete(run, monkeypatch):
    def killed(output):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "write_run_report", killed)
    with pytest.raises(KeyboardInterrupt):
        training.reported(SimpleNamespace(output=run))
    assert is_own_card(run / "model" / "README.md")


def test_a_card_of_somebody_is_left_alone(run):
    path = run / "model" / "README.md"
    assert write_model_card(run) == path
    first = path.read_text()
    assert is_own_card(path)
    assert write_model_card(run, "me/mine") == path
    assert path.read_text() == first.replace("path/to/this/folder", "me/mine").replace(
        first[first.rindex("<!--") :], path.read_text()[path.read_text().rindex("<!--") :]
    )
    for other in (
        "my own\n",
        "",
        path.read_text().replace("## Use", "## How to use"),
        path.read_text() + "more",
        "\ufeff" + first,
    ):
        path.write_text(other)
        assert not is_own_card(path)
        assert write_model_card(run) is None
        assert path.read_text() == other
    path.write_bytes(b"\xff\xfe")
    assert write_model_card(run) is None
    path.unlink()
    path.symlink_to(run / "elsewhere.md")
    assert write_model_card(run) is None
    assert not (run / "elsewhere.md").exists()


def test_without_training_the_weights_are_the_source_models():
    text = card(stages=[{**STAGE, "steps": 0, "tokens": 0}], after=[], before=[])
    assert "nothing was trained" in text
    assert "Nothing was measured." in text
    assert "base_model_relation" not in text


def test_it_says_that_indexers_were_not_trained(run):
    needs_transformers(INDEXERS_SINCE, "a model with indexers")
    own = {key: value for key, value in INDEXED.items() if key not in ("model_type", "architectures")}
    transformers.DeepseekV32Config(num_hidden_layers=2, **own).save_pretrained(run / "model")
    text = write_model_card(run).read_text()
    assert "- Indexers are not trained: no gradient reaches them" in text[text.index("## Limits") :]
