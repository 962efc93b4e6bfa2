"""``ropewalk inspect`` through the program's own main: what it prints, as JSON or table, and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.cli import app as program
from ropewalk.io.lengths import parse_length
from ropewalk.rope import Cope, Default, Llama3, replace_methods, scaled_theta
from ropewalk.rope.theory import SEARCH_LIMIT, context_bound
from tests.checkpoint_cases import CASES, path_of
from tests.places import SHARED

LLAMA_3_1 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
GEMMA_3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}

ADVISED = {
    "llama-2-7b": "1M",
    "llama-3-8b": "1M",
    "llama-3.1-8b": "1M",
    "mistral-7b-v0.1": "128k",
    "qwen2.5-7b-instruct": "128k",
    "smollm3-3b": "128k",
    "gemma-3-4b": "256k",
    "command-r7b": "256k",
    "phi-2": "16k",
    "phi-3-mini-128k-instruct": "256k",
    "internlm2.5-7b": "1M",
}

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command."""
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *arguments: program.main(["inspect", *map(str, arguments)])


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_json_describes_llama_3_1(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, LLAMA_3_1)
    assert run(tmp_path, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    (method,) = said.pop("methods")
    assert said == {
        "model": str(tmp_path),
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "config_class": "LlamaConfig",
        "defaults": {},
        "max_position_embeddings": 131072,
        "trained_length": 131072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "layers": [{"kind": "full_attention", "window": None, "rotates": True}] * 32,
        "notes": [],
        "tokens": None,
        "target": None,
        "extension_choices": None,
        "readers": None,
        "readers_at_target": None,
    }
    inv_freq = Llama3(128, 500000.0, 8.0, 1.0, 4.0, 8192).frequencies().inv_freq.tolist()
    loaded = method["loaded"]
    assert (loaded["dtype"], loaded["attention_factor"]) == ("float32", 1.0)
    # The buffer holds float32 roundings of float32 powers; see rope_cases.
    assert loaded["inv_freq"] == pytest.approx(inv_freq, rel=1e-6)
    assert 0 < loaded["largest_relative_difference"] < 1e-6
    assert method == {
        "layer_type": None,
        "name": "llama3",
        "rope_theta": 500000.0,
        "rotary_dim": 128,
        "attention_factor": 1.0,
        "parameters": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "shortest_wavelength": 2 * math.pi,
        "longest_wavelength": 2 * math.pi / inv_freq[-1],
        "critical_dimension": 70,
        "critical_dimension_length": 8192,
        "context_bound": 85132,
        "inv_freq": inv_freq,
        "loaded": loaded,
    }


def test_table_names_every_fact(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(written(tmp_path, LLAMA_3_1)) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for fact in (
        "model type llama",
        "maximum length 131,072 tokens",
        "heads 32 query, 8 key/value, 128 dimensions each",
        "RoPE method llama3",
        "rope_theta 500000",
        "rotary_dim 128 of 128",
        "factor 8",
        "original_max_position_embeddings 8192",
        "wavelengths 6.3 to",
        "critical dimension 70 dimensions complete a turn in 8,192 tokens",
    ):
        assert fact in said


def test_layer_types_are_described_one_by_one(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, GEMMA_3)
    assert run(path, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [(method["layer_type"], method["name"]) for method in said["methods"]] == [
        ("full_attention", "linear"),
        ("sliding_attention", "default"),
    ]
    assert said["model_type"] == "gemma3_text"
    assert said["sliding_window"] == 1024
    # 2·ceil(128·log_1e6(131072 / 8 / 2π)): a linear factor of 8 says that 16384 tokens came before.
    assert said["methods"][0]["critical_dimension"] == 2 * math.ceil(
        128 * math.log(16384 / (2 * math.pi), 1e6)
    )
    assert run(path) == 0
    assert "sliding_attention" in capsys.readouterr().out


def test_frequencies_are_those_of_the_longest_input(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "head_dim": 4,
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 64,
        "use_sliding_window": False,
        "sliding_window": 32,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "su", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]},
    }
    path = written(tmp_path, config)
    assert run(path, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sliding_window"] is None
    assert said["methods"][0]["inv_freq"] == [0.5, 0.0025]
    assert run(path) == 0
    assert "2 factors, 2 to 4" in capsys.readouterr().out


def test_a_cope_checkpoint_is_recognised_and_its_still_pair_has_no_period(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**LLAMA_3_1, "max_position_embeddings": 65536}
    path = written(tmp_path, replace_methods(config, Cope(128, 1e7, 20, 65536)))
    assert run(path, "--json") == 0
    (method,) = json.loads(capsys.readouterr().out)["methods"]
    assert method["name"] == "cope"
    assert method["parameters"] == {"clipped": 20, "original_max_position_embeddings": 65536}
    assert method["inv_freq"][-1] == 0
    assert method["longest_wavelength"] == pytest.approx(2 * math.pi / method["inv_freq"][-2])
    assert run(path) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "cope: the 20 slowest pairs clipped, the slowest of all does not rotate" in text
    assert "128 of 128; 1 of 64 pairs does not rotate" in text


def test_hub_id_is_read_through_its_config(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, LLAMA_3_1)
    asked = []

    def download(model: str, name: str) -> str:
        asked.append((model, name))
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert run("meta-llama/Llama-3.1-8B", "--json") == 0
    assert asked == [("meta-llama/Llama-3.1-8B", "config.json")]
    assert json.loads(capsys.readouterr().out)["model"] == "meta-llama/Llama-3.1-8B"


def test_unknown_hub_id_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(model: str, name: str) -> str:
        raise OSError("not found")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert run("nobody/nothing") == 2
    assert "no folder nobody/nothing, and no config.json could be loaded for it" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["./missing", "/missing/folder", "missing/config.json", "a/b/c"])
def test_missing_path_is_refused_without_asking_the_hub(
    run: Run, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", pytest.fail)
    assert run(model) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: there is no folder or file {model}\n"
    assert captured.out == ""


def test_bad_files_are_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 2
    assert "has no config.json" in capsys.readouterr().err
    path = written(tmp_path, [])
    assert run(path) == 2
    assert "must contain a JSON object, got list" in capsys.readouterr().err
    path.write_text("{")
    assert run(path) == 2
    assert "as JSON" in capsys.readouterr().err
    written(tmp_path, {"hidden_size": 64, "num_attention_heads": 4})
    assert run(path) == 2
    assert "no rope_theta" in capsys.readouterr().err


@pytest.mark.parametrize("pad", [128256, 32000, -1000])
def test_a_token_for_padding_outside_the_vocabulary_does_not_matter(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], pad: int
) -> None:
    path = written(tmp_path, {**LLAMA_3_1, "vocab_size": 32000, "pad_token_id": pad})
    assert run(path, "--readers") == 0
    assert "within" in capsys.readouterr().out


def test_a_gguf_file_is_named(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model-q4.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00\xff")
    assert run(path) == 2
    assert (
        f"{path} is a GGUF file, which has no config.json; give the folder of the model that it was converted from"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", CASES)
def test_configs_that_people_have_are_read_right_and_no_default_is_silent(
    run: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    assert run(path_of(name), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["defaults"] == case.defaults
    assert {method["layer_type"] for method in said["methods"]} == set(case.methods)
    for method in said["methods"]:
        expected = case.methods[method["layer_type"]]
        length = said["max_position_embeddings"]
        assert (method["name"], method["rope_theta"]) == (expected.name, expected.rope_theta)
        assert method["inv_freq"] == expected.frequencies(length).inv_freq.tolist()
        bound = context_bound(expected.frequencies(length).inv_freq)
        assert method["context_bound"] == (SEARCH_LIMIT if bound is None else bound)
        if method["loaded"] is not None:
            assert method["loaded"]["dtype"] == "float32"
            assert method["loaded"]["largest_relative_difference"] < 1e-6
    assert run(path_of(name)) == 0
    text = capsys.readouterr().out
    for key in case.defaults:
        assert f"note: config.json omits {key}; " in text


def test_target_gives_every_rule_its_bound_and_a_recommendation(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "periods.png"
    assert run(path_of("llama-3-8b"), "--target", "128k", "--json", "--plot", picture) == 0
    target = json.loads(capsys.readouterr().out)["target"]
    assert (target["trained_length"], target["target_length"]) == (8192, 131072)
    by_rule = {setting["rule"]: setting for setting in target["settings"]}
    law = by_rule["critical-dimension"]
    theta = scaled_theta(500000.0, 8192, 131072)
    assert law["rope_theta"] == theta
    assert law["context_bound"] == context_bound(Default(128, theta).frequencies().inv_freq)
    assert target["recommended"] == "critical-dimension"
    assert target["recommendation"]["rope_theta"] == theta
    assert target["feasible"] is None
    assert [stage["context"] for stage in target["stages"]] == [32768, 131072]
    assert target["action"].startswith(f"Set rope_theta to {theta:,.0f}")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert run(path_of("llama-3-8b"), "--target", "128k") == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        f"Set rope_theta to {theta:,.0f} in the last stage, and train in 2 stages: at 32,768 and then 131,072 "
        "tokens.",
        "a low perplexity alone does not show that the model uses the context",
        f"rope: {{method: theta, rope_theta: {theta:.10g}}}",
        "use bases from 5,000,000 (Qwen2.5-1M) to 150,000,000 (ChatQA 2 70B)",
    ):
        assert part in text
    assert "arXiv" not in text
    assert run(path_of("llama-3-8b"), "--target", "16k", "--explain") == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "critical-dimension ←",
        "b' = b^(ln(T'/2π) / ln(T/2π))",
        "arXiv:2310.05209",
        "smallest feasible base with 128 rotary dimensions (first of 72 intervals) │ 231,644",
        "start of the first feasible interval at least 10 % wide │ 571,952",
        "safe base: every larger base up to 1e+12 is feasible │ 1,321,078",
        "Code Llama: 16,384 tokens, from 4,096 tokens with base 10,000 │ 1,000,000",
        "RoPE method │ default",
        "Bertsch et al., arXiv:2608.10296 (OlmPool)",
    ):
        assert part in text, part


@pytest.mark.parametrize("name", ADVISED)
def test_the_answer_comes_first_and_its_reasons_fit_a_screen(
    run: Run, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(path_of(name), "--target", ADVISED[name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("To reach ")
    orders = ("Set ", "Search ", "Leave RoPE", "Change nothing", "ropewalk extend does not train")
    assert lines[1].startswith(orders)
    lifted = "Why, with the windows lifted"
    assert len(lines) - lines.index(lifted if lifted in lines else "Why") <= 28
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("gemma-3-4b", "256k", "layers of type sliding_attention have their own RoPE"),
        ("qwen3-next-80b-a3b", "512k", "each of 36 layers (of 48) is recurrent and has no RoPE"),
        ("gpt-oss-20b", "256k", "sees only the last 128 tokens (sliding_window), whatever the base"),
    ],
)
def test_layers_with_a_window_are_named_beside_the_recipe(
    run: Run, name: str, target: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(path_of(name), "--target", target) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "stages:" in text
    assert said in text


def test_a_window_in_every_layer_leaves_a_choice(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path_of("mistral-7b-v0.1"), "--target", "128k") == 0
    before, then = " ".join(capsys.readouterr().out.split()).split("If the windows are lifted")
    assert "ropewalk extend does not train this model at" in before
    assert "a sliding window of 4,096 tokens in every layer" in before
    assert "layers together reach 131,041;" in before
    assert "stages:" not in before
    assert "context bound" not in before
    assert "lift: [windows] stages: - context: 32k" in then
    assert "- context: 128k rope: {method: theta, rope_theta: 4869104.38}" in then


def test_layers_without_rope_are_extended_as_they_are(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path_of("command-r7b"), "--target", "256k") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Leave RoPE unchanged, and train at 262,144 tokens." in text
    assert "rope: {method: default} steps" in text
    assert "Layers with RoPE attend to at most 4,096 tokens" in text
    assert "context bound" not in text


def test_dropout_is_to_be_taken_away_first(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path_of("granite-3.1-2b"), "--target", "256k") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "First set attention_dropout to 0 in config.json (it is 0.1, which no attention engine supports)."
        in text
    )
    assert "rope: {method: theta, rope_theta: 23662397.1}" in text


def test_notes_tell_of_windows_layers_without_rope_and_dual_chunks(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, part in (
        ("smollm3-3b", "every 4th layer, from 3 to 35 (of 36, counted from 0) has no RoPE"),
        ("command-r7b", "every 4th layer, from 3 to 31 (of 32, counted from 0) has no RoPE"),
        ("qwen2.5-7b-instruct-1m", "the model is taken as trained for 262144"),
    ):
        assert run(path_of(name)) == 0
        assert part in " ".join(capsys.readouterr().out.split())
    assert run(path_of("qwen2.5-7b-instruct-1m"), "--target", "1M", "--json") == 0
    target = json.loads(capsys.readouterr().out)["target"]
    assert target["trained_length"] == 262144
    assert target["stages"]


def test_the_trained_length_can_be_set_right(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path_of("mistral-7b-v0.1"), "--target", "32k", "--json") == 0
    assert json.loads(capsys.readouterr().out)["target"]["trained_length"] == 8192
    assert run(path_of("mistral-7b-v0.1"), "--target", "32k", "--from", "32k", "--json") == 0
    assert json.loads(capsys.readouterr().out)["target"]["action"].startswith("Change nothing")


# The bounds of partial dimensions take seconds at 200K tokens.
@pytest.mark.parametrize(
    ("name", "target"),
    [("phi-3-mini-128k-instruct", "200k"), ("yarn-llama-2-7b-128k", "200k"), ("phi-2", "8k")],
)
def test_advice_on_scaled_and_partial_checkpoints(
    run: Run, name: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(path_of(name), "--target", target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["target"]["action"]
    assert run(path_of(name), "--target", target) == 0
    assert f"To reach {parse_length(target):,} tokens" in capsys.readouterr().out


def test_contradicting_fields_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, {**LLAMA_3_1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert run(path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "10000.0" in captured.err
    assert "500000.0" in captured.err


def test_help_has_an_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert "ropewalk inspect meta-llama/Llama-3.1-8B --target 1M" in said
    assert "MODEL" in said


def test_real_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = SHARED / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip("the stored checkpoint is not beside the repository")
    assert run(folder, "--json") == 0
    (method,) = json.loads(capsys.readouterr().out)["methods"]
    assert (method["name"], method["rope_theta"], method["rotary_dim"]) == ("default", 10000.0, 8)
    assert method["inv_freq"] == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-15)
