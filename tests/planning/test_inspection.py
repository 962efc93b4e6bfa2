"""What inspect finds in a checkpoint's config, without loading it."""

import json
import math
from pathlib import Path

import pytest

from ropewalk.cli.app import main
from ropewalk.models.config.file import config_from_json
from ropewalk.models.config.layers import INDEXERS_SINCE
from ropewalk.models.support import REFUSED_BY_CODE, ModelsSettings, packing_refusal, supported
from ropewalk.planning import InspectSettings, inspect
from ropewalk.planning.inspection import advise_on
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.training import load_recipe
from ropewalk.versions import older_transformers
from tests.checkpoint_cases import path_of
from tests.data.tokens.test_special_ids import chat_tokenizer
from tests.places import CONFIGS, ROOT
from tests.planning.planning_cases import LLAMA, printed
from tests.versions import NEWEST


@pytest.mark.parametrize("target", [None, 32768])
def test_inspect_returns_what_the_command_prints(
    target: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [] if target is None else ["--target", str(target)]
    found = inspect(InspectSettings(model=LLAMA, target=target))
    assert json.loads(json.dumps(found.to_json(), allow_nan=False)) == printed(
        capsys, "inspect", LLAMA, *asked
    )
    assert LLAMA in found._repr_html_()


def test_with_a_target_a_result_says_what_to_do_and_has_a_row_for_each_rule() -> None:
    plain = inspect(InspectSettings(model=LLAMA))
    assert "trained for 8,192 tokens" in repr(plain)
    assert [row["rope_theta"] for row in plain.overview()] == [500_000]
    found = inspect(InspectSettings(model=LLAMA, target=2**17))
    text = repr(found)
    assert found.advice is not None
    assert found.advice.chosen is not None
    assert found.advice.chosen.method is not None
    assert found.advice.action in " ".join(text.split())
    assert len(text.splitlines()) <= 24
    rows = found.overview()
    assert {row["rule"] for row in rows} == {each.rule for each in found.advice.settings}
    (chosen,) = (row for row in rows if row["recommended"])
    assert chosen["rope_theta"] == found.advice.chosen.method.rope_theta
    assert f"rope_theta to {chosen['rope_theta']:,.0f}" in text


def test_the_numbers_of_a_config_are_those_of_the_shape(whole: str) -> None:
    found = inspect(InspectSettings(model=whole))
    shape = ModelShape.from_config(found.config)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)


def table_of_bases() -> list[list[str]]:
    page = (ROOT / "docs" / "how-to" / "choose-a-base.md").read_text(encoding="utf-8")
    table = page.split("| base for 128K | base for 1M |\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return [[name, *rest] for names, *rest in rows for name in names.split(", ")]


CONFIGS_OF_BASES = {
    "Llama 2 7B": "llama-2-7b",
    "Llama 3 8B": "llama-3-8b",
    "Mistral 7B v0.2": "mistral-7b-v0.2",
    "v0.3": "mistral-7b-v0.3",
    "Qwen2.5 7B": "qwen2.5-7b-instruct",
    "Qwen3 8B": "qwen3-8b",
    "SmolLM3 3B": "smollm3-3b",
}


@pytest.mark.parametrize("row", table_of_bases(), ids=lambda row: row[0])
def test_the_page_on_bases_has_the_lengths_and_bases_of_inspect(row: list[str]) -> None:
    name, trained, base, *bases = row
    model = str(CONFIGS / f"{CONFIGS_OF_BASES[name]}.json")
    for target, wanted in zip((2**17, 2**20), bases, strict=True):
        found = inspect(InspectSettings(model=model, target=target))
        assert found.config.trained_length == int(trained.replace(",", ""))
        assert found.config.full_attention_rope.rope_theta == float(base)
        assert found.advice is not None
        theta = found.advice.chosen.method.rope_theta
        mantissa, exponent = f"{theta:.2e}".split("e")
        assert f"{mantissa}e{int(exponent)}" == wanted


def test_dimensions_that_complete_a_turn_are_those_of_the_documented_length() -> None:
    """Qwen3 8B: trained for 32,768 tokens, whatever its config's max_position_embeddings; base 1e6, 128 dimensions."""
    found = inspect(InspectSettings(model=str(CONFIGS / "qwen3-8b.json"))).to_json()
    assert (found["max_position_embeddings"], found["trained_length"]) == (40960, 32768)
    (method,) = found["methods"]
    assert method["critical_dimension_length"] == 32768
    turning = [pair for pair in range(64) if 2 * math.pi * 1e6 ** (pair / 64) <= 32768]
    assert method["critical_dimension"] == 2 * len(turning)


def test_the_shipped_recipe_of_qwen3_has_the_base_of_inspect() -> None:
    found = inspect(InspectSettings(model=str(CONFIGS / "qwen3-8b.json"), target=2**17))
    (stage,) = load_recipe("qwen3-128k").stages
    assert found.advice is not None
    assert stage.rope.limiting.rope_theta == round(found.advice.chosen.method.rope_theta)


STABLELM = {
    "model_type": "stablelm",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "partial_rotary_factor": 0.25,
}
INDEXED = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}


@pytest.mark.skipif(
    older_transformers(NEWEST) is not None, reason="the table of families holds for the newest"
)
def test_what_only_the_code_of_a_family_refuses_is_said_before_weights_are_read() -> None:
    """No key of StableLM's config says that its attention passes nothing on; the table of families does."""
    (refusal,) = config_from_json(STABLELM, "m").reach_refusals(32768)
    assert refusal.startswith(
        "does not support packed rows: StableLmAttention does not pass keyword arguments"
    )
    assert advise_on(config_from_json(STABLELM, "m"), 32768).refusals == (refusal,)
    assert config_from_json({**STABLELM, "model_type": "phi"}, "m").reach_refusals(32768) == []


def test_the_table_of_another_transformers_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropewalk.models.support.version", lambda _: "99.0")
    assert packing_refusal("stablelm") is None


@pytest.mark.skipif(
    older_transformers(INDEXERS_SINCE) is not None, reason="an older transformers cannot train deepseek_v32"
)
def test_indexed_attention_has_rope_over_all_earlier_tokens() -> None:
    """DeepSeek-V3.2 chooses 2,048 of all earlier tokens: its RoPE limits the context as with full attention."""
    config = config_from_json(INDEXED, "m")
    assert config.context_layers(config.trained_length) == list(range(61))
    assert not any("no RoPE" in note or "no layer has RoPE" in note for note in config.planning_notes)
    assert config.planning_notes[0].startswith(
        "every layer attends to 2,048 earlier tokens, which an indexer chooses"
    )
    assert config.reach_refusals(2**20) == []
    assert any(note.startswith("indexers are not trained") for note in config.planning_notes)


def test_a_refusal_for_a_value_of_the_small_model_is_not_passed_on() -> None:
    """Moshi's small model has a window of 7 tokens that its code ignores; a checkpoint may have none."""
    families = supported(ModelsSettings()).families
    assert families["moshi"]["packed_training"].status == "refused"
    assert packing_refusal("moshi") is None
    assert {families[name]["packed_training"].status for name in REFUSED_BY_CODE} == {"refused"}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        (
            "qwen2_audio",
            "is of type qwen2_audio, which AutoModelForMultimodalLM alone of transformers loads; ropewalk",
        ),
        ("t5gemma2", "is an encoder-decoder (t5gemma2); ropewalk extends only decoders"),
        (
            "qwen3_vl_text",
            "is of type qwen3_vl_text, which no class for language models of transformers loads",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_gets_no_recipe(
    model_type: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = {"qwen2_audio": "text_config", "t5gemma2": "decoder"}.get(model_type)
    length = {"max_position_embeddings": 4096}
    stated = {"model_type": model_type, **({decoder: length} if decoder else length)}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    without = inspect(InspectSettings(model=str(tmp_path)))
    assert any(
        note.startswith(f"ropewalk extend cannot train this model: it {why}") for note in without.notes
    )
    advice = inspect(InspectSettings(model=str(tmp_path), target=1048576)).advice
    assert advice is not None
    assert advice.refusals[0].startswith(why)
    assert "stages:" not in str(advice.to_json()["action"])
    (tmp_path / "documents.txt").write_text("a document")
    asked = ["init", str(tmp_path), "--target", "1048576", "--documents", str(tmp_path / "documents.txt")]
    assert main([*asked, "--out", str(tmp_path / "recipe.yaml")]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_model_with_encoders_gets_a_recipe() -> None:
    config = config_from_json(
        {"model_type": "qwen3_vl", "text_config": {"max_position_embeddings": 32768}}, "m"
    )
    assert config.loading_refusals() == []
    assert advise_on(config, 1048576).refusals == ()


def test_the_tokens_of_rows_are_those_of_the_tokenizer_beside_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(Path(LLAMA).read_text())
    assert inspect(InspectSettings(model=str(tmp_path))).tokens is None
    chat_tokenizer().save_pretrained(tmp_path)
    found = inspect(InspectSettings(model=str(tmp_path)))
    assert [str(each) for each in found.tokens or ()] == [
        "anchor <|im_start|> (bos_token)",
        "document end <|im_end|> (eos_token)",
    ]
    assert [note.split(" marks ")[0] for note in found.notes[:2]] == [
        "the tokenizer's bos_token <|im_start|>",
        "the tokenizer's eos_token <|im_end|>",
    ]
    assert main(["inspect", str(tmp_path)]) == 0
    line = "tokens of packed rows: anchor <|im_start|> (bos_token), document end <|im_end|> (eos_token)"
    assert line in capsys.readouterr().out.splitlines()


def test_programs_are_read_with_the_recommended_setting_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(path_of("gemma-3-1b").read_text())
    for model in (tmp_path, tmp_path / "config.json"):
        found = inspect(InspectSettings(model=str(model), target=2**17, readers=True))
        assert found.readers is not None
        assert found.readers_at_target is not None
        now, then = ({each.key: each for each in some} for some in (found.readers, found.readers_at_target))
        assert (now["vllm"].served, then["vllm"].served) == (2**15, 2**17)
        assert "EXTENDED" in str(then["vllm"].launch)
    # Nothing changes for a length that the model has.
    assert inspect(InspectSettings(model=str(tmp_path), target=2**15, readers=True)).readers_at_target is None
    assert inspect(InspectSettings(model=str(tmp_path), target=2**17)).readers_at_target is None
