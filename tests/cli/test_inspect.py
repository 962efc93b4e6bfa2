"""``ropewalk inspect`` through the program's own main: what it prints, as JSON or table, and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from ropewalk.cli import app as program
from ropewalk.cli import inspect
from ropewalk.rope import Llama3

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

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program with this one command."""
    app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    inspect.register(app)
    monkeypatch.setattr(program, "app", app)
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
        "max_position_embeddings": 131072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
    }
    inv_freq = Llama3(128, 500000.0, 8.0, 1.0, 4.0, 8192).frequencies().inv_freq.tolist()
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
        "inv_freq": inv_freq,
    }


def test_table_names_every_fact(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(written(tmp_path, LLAMA_3_1)) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for fact in (
        "model type llama",
        "longest input 131,072 tokens",
        "heads 32, key/value 8, of 128 dimensions",
        "RoPE method llama3",
        "rope_theta 500000",
        "rotary_dim 128 of 128",
        "factor 8",
        "original_max_position_embeddings 8192",
        "wavelengths 6.3 to",
        "critical dimension 70",
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
    assert said["model_type"] == "gemma3"
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
    assert "no folder nobody/nothing, and the Hub gave no config.json" in capsys.readouterr().err


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
    assert "must hold a JSON object, got list" in capsys.readouterr().err
    path.write_text("{")
    assert run(path) == 2
    assert "as JSON" in capsys.readouterr().err
    written(tmp_path, {"hidden_size": 64, "num_attention_heads": 4})
    assert run(path) == 2
    assert "no rope_theta" in capsys.readouterr().err


def test_help_has_an_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert "ropewalk inspect meta-llama/Llama-3.1-8B --json" in said
    assert "MODEL" in said


def test_real_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2].parent / "shared" / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip("the stored checkpoint is not beside the repository")
    assert run(folder, "--json") == 0
    (method,) = json.loads(capsys.readouterr().out)["methods"]
    assert (method["name"], method["rope_theta"], method["rotary_dim"]) == ("default", 10000.0, 8)
    assert method["inv_freq"] == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-15)
