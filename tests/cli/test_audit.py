"""``ropewalk audit`` through the program's own main, on a tiny random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ropewalk.cli.app import main
from tests.cli.byte_checkpoint import save_byte_checkpoint

FEW = ("--samples", "2", "--ablation-samples", "1", "--shifts", "0,16,1000")
PICTURES = {"drift", "samples", "tokens", "lengths", "heads", "first-token", "ablation", "mitigations"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_checkpoint(tmp_path_factory.mktemp("models") / "tiny model", 96, initializer_range=0.3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n * n} " + "abc de fgh " * 8}) + "\n" for n in range(9)))
    return path


@pytest.fixture(scope="module")
def audited(
    checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """One audit with everything, printed as JSON and drawn."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("audit") / "píctures"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["audit", str(checkpoint), "--text", str(text), *FEW, "--plot", str(folder), "--json"])
    assert status == 0
    return json.loads(out.getvalue()), folder


@pytest.mark.slow
def test_json_has_the_lists_that_were_promised(audited: tuple[dict[str, Any], Path]) -> None:
    said, _ = audited
    assert {
        "drift",
        "ablation",
        "mitigations",
        "rope",
        "first_token",
        "lengths",
        "sweep",
        "heads",
        "finding",
    } <= set(said)
    assert {"dtype", "parameters", "delta1", "delta2", "D", "first_token_share"} <= set(said["drift"][0])
    assert {"delta1", "delta2", "D"} == set(said["sweep"][0])
    assert (said["near"], said["far"], said["delta2"]) == (0, 1000, 16)
    assert {"step", "D", "logit_error"} <= set(said["ablation"][0])
    assert {"name", "D", "logit_error"} <= set(said["mitigations"][0])
    assert {"stage", "inv_freq", "dtype"} <= set(said["rope"][0])
    of_drift = {(d["dtype"], d["angles"], d["parameters"], d["delta1"]) for d in said["drift"]}
    assert of_drift == {
        (dtype, angles, parameters, shift)
        for dtype, angles in [
            *((d, "model") for d in ("bfloat16", "float16", "float32")),
            ("float32", "exact"),
        ]
        for parameters in ("pretrained", "random")
        for shift in (0, 16, 1000)
    }
    assert said["length"] == 96
    assert said["samples"] == 2
    assert len(said["finding"]) == 3
    assert len(said["per_token"]) == 96


def test_figures_are_those_of_one_audit(audited: tuple[dict[str, Any], Path]) -> None:
    said, _ = audited
    same = [d for d in said["drift"] if d["delta1"] == d["delta2"]]
    assert all(d["D"] == 0 and d["first_token_share"] is None for d in same)
    whole = next(r for r in said["ablation"] if r["step"] == "all" and r["delta1"] == 0)
    eager = next(m for m in said["mitigations"] if m["name"] == "eager attention")
    assert whole["D"] == pytest.approx(eager["D"], rel=1e-6)
    stages = {stage["stage"]: stage for stage in said["rope"]}
    assert {"config", "loaded", "to bfloat16", "to float16", "saved and loaded"} == set(stages)
    assert stages["to bfloat16"]["frequency_error"] > 1e-4 > stages["loaded"]["frequency_error"]


def test_every_picture_is_drawn(audited: tuple[dict[str, Any], Path]) -> None:
    _, folder = audited
    assert {path.stem for path in folder.iterdir()} == PICTURES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_tables_and_sentences_for_people(
    checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(checkpoint), "--text", str(text), *FEW, "--no-random-control"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(
        "In bfloat16, a row of 96 tokens attends differently at position 0 than at 16: "
    )
    assert "of all attention moves to other tokens (D = " in said.out
    for words in (
        "rounding cos and sin",
        "exact angles",
        "to bfloat16",
        "positions reset",
        "the first token",
    ):
        assert words in said.out
    assert "random" not in said.out
    assert "rows of 96 tokens, the trained length of the model" in said.err
    assert "Loading" not in said.out + said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtypes", "float8"], "cannot audit dtype 'float8'; choose from bfloat16, float16, float32"),
        (["--dtypes", ""], "at least one"),
        (["--shifts", "16"], "--shifts 16 leaves nothing to compare"),
        (["--shifts", "0,0"], "give each shift only once, got 0, 0"),
        (["--shifts", "-5"], "--shifts: '-5' is not a length"),
        (["--delta2", "0,1"], "--delta2: '0,1' is not a length"),
        (["--shifts", "9000000000000"], "a shift must be 0 to 1099511627776 tokens"),
        (["--shifts", ""], "at least one shift"),
        (["--text", "/no/such/file"], "/no/such/file"),
        (["--length", "100000"], "too few for one row of 100000"),
        (["--length", "1"], "2 tokens or more"),
        (["--length", "7"], "a row of one document must have 8 tokens or more, because the audit"),
        (["--device", "tpu"], "'tpu'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    checkpoint: Path, text: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(checkpoint), "--text", str(text), *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") <= 2
    assert printed.out == ""


def test_a_file_in_place_of_the_folder_is_refused_before_the_work(
    checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(checkpoint), "--text", str(text), "--plot", str(text)]) == 2
    assert "--plot" in capsys.readouterr().err
    assert main(["audit", str(checkpoint), "--text", str(text), "--plot", str(text / "below")]) == 2
    assert "below for --plot: Not a directory" in capsys.readouterr().err


def test_a_model_with_learned_sinks_is_audited(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.GptOssConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=96,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path)
    few = (*FEW, "--no-random-control", "--json")
    assert main(["audit", str(tmp_path), "--text", str(text), *few]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(tmp_path)
