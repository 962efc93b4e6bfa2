"""The table of readers: verdicts, words, and the refusal of programs that read a config wrongly."""

import json
from pathlib import Path

import pytest

from ropewalk.compatibility.reader import Checkpoint
from ropewalk.compatibility.table import (
    READERS,
    cautions,
    difference,
    readings,
    readings_of,
    refuse_wrong,
    sentences,
    wrong_servers,
)
from ropewalk.errors import RopewalkError
from ropewalk.reporting.compatibility import readers_parts
from ropewalk.reporting.tables import ResultTable
from ropewalk.rope import Default, Linear, LongRope, Yarn, for_all_readers
from tests.compatibility.recorded import checkpoint, record

LONG = LongRope(16, 5e4, (1.0,) * 8, (2.0,) * 8, 1.0, 1024)


def verdicts(name: str) -> dict[str, str]:
    return {each.key: each.verdict for each in readings_of(checkpoint(name), "my/model")}


def test_one_number_in_both_spellings_is_read_by_all() -> None:
    assert set(verdicts("llama theta both").values()) == {"same"}
    assert len(READERS) == len(verdicts("llama theta both"))


def test_the_newer_spelling_alone_is_lost_on_programs_that_read_the_file_themselves() -> None:
    found = verdicts("llama theta newer")
    assert {key for key, verdict in found.items() if verdict != "same"} == {"transformers-4", "mlx-lm"}


def test_an_attention_factor_of_yarn_divides_the_programs() -> None:
    assert verdicts("llama yarn-attention both") == {
        "transformers": "same",
        "transformers-4": "same",
        "vllm": "same",
        "vllm-0.22": "with an option",
        "sglang": "differs",
        "llama.cpp": "with an option",
        "mlx-lm": "differs",
    }


def test_as_ropewalk_writes_it_more_programs_read_an_attention_factor_of_yarn() -> None:
    read = checkpoint("llama yarn-attention both")
    completed = for_all_readers(read.completed)
    scaling = {key: value for key, value in completed["rope_parameters"].items() if key != "rope_theta"}
    written = Checkpoint({**read.stated, **completed, "rope_scaling": scaling}, completed)
    found = {each.key: each.verdict for each in readings_of(written, "my/model")}
    others = [key for key, verdict in found.items() if verdict != "same"]
    assert others == ["vllm-0.22", "llama.cpp"]
    assert {found[key] for key in others} == {"with an option"}


def test_double_scaling_a_dropped_factor_and_a_lost_base_are_seen() -> None:
    twice = difference(Linear(16, 5e4, 2.0), Linear(16, 5e4, 4.0), 4096)
    assert twice == "angles off by up to 1.02e+03 rad at 4,096 tokens"
    dropped = difference(Yarn(16, 5e4, 4.0, 1024, attention_factor=1.0), Yarn(16, 5e4, 4.0, 1024), 4096)
    assert dropped == "attention factor 1.13863, not 1"
    assert "rad at 4,096" in difference(Default(16, 5e6), Default(16, 1e4), 4096)
    assert difference(Default(16, 5e6), Default(16, 5e6), 4096) == ""


def test_factors_chosen_once_differ_for_short_inputs_alone() -> None:
    found = difference(LONG, LONG, 4096, fixed=True)
    assert found == "angles off by up to 512 rad at 1,024 tokens"
    assert difference(LONG, LONG, 4096) == ""
    # A context within the original length never takes the long factors.
    assert difference(LONG, LONG, 1024, fixed=True) == ""


def test_two_lists_of_longrope_are_right_for_short_and_long_inputs_with_a_command_each() -> None:
    found = {each.key: each for each in readings_of(checkpoint("llama longrope both"), "my/model")}
    assert {key: each.verdict for key, each in found.items()} == {
        "transformers": "same",
        "transformers-4": "same",
        "vllm": "long inputs only",
        "vllm-0.22": "long inputs only",
        "sglang": "long inputs only",
        "llama.cpp": "with an option",
        "mlx-lm": "long inputs only",
    }
    entry = checkpoint("llama longrope both").stated["rope_parameters"]
    pairs = enumerate(zip(entry["short_factor"], entry["long_factor"], strict=True))
    largest = max(1024 * 5e4 ** (-pair / 8) * abs(1 / short - 1 / long) for pair, (short, long) in pairs)
    apart = f"angles off by up to {largest:.3g} rad at 1,024 tokens"
    for key in ("vllm", "vllm-0.22", "llama.cpp", "mlx-lm"):
        assert found[key].short == 1024
        assert found[key].detail.endswith(
            f"takes the long factors also for inputs of up to 1,024 tokens if its context is longer: {apart}"
        )
    long, short = "inputs above 1,024 tokens", "inputs up to 1,024 tokens"
    assert found["vllm"].commands == [
        (long, "vllm serve my/model --max-model-len 4096"),
        (short, "vllm serve my/model --max-model-len 1024"),
    ]
    assert found["llama.cpp"].commands == [
        ("first", "ropewalk export my/model --gguf CONVERTED.gguf --out FILE.gguf"),
        (long, "llama-server -m FILE.gguf -c 4096"),
        (short, "llama-server -m FILE.gguf -c 1024"),
    ]
    assert [inputs for inputs, _ in found["mlx-lm"].commands] == [long]
    # Each pass of SGLang has one list: no input may be read in parts.
    assert "batched with longer ones" in found["sglang"].detail
    assert (
        found["sglang"]
        .commands[0][1]
        .endswith("--context-length 4096 --chunked-prefill-size -1 --disable-radix-cache")
    )


@pytest.mark.parametrize(
    ("name", "needed"), [("llama longrope both", "CONVERTED.gguf"), ("llama theta both", "FILE.gguf")]
)
def test_commands_for_llama_cpp_say_where_their_file_comes_from(name: str, needed: str) -> None:
    *_, commands = readers_parts(readings_of(checkpoint(name), "my/model"), "title")
    assert isinstance(commands, ResultTable)
    assert commands.notes == (f"{needed}: the model as converted by llama.cpp's convert_hf_to_gguf.py",)


def test_equal_lists_are_the_same_for_every_program_that_reads_them() -> None:
    long = checkpoint("llama longrope both").stated["rope_parameters"]["long_factor"]
    raw = record()["configs"]["llama longrope both"]
    one = {key: {**raw[key], "short_factor": long} for key in ("rope_parameters", "rope_scaling")}
    found = readings_of(checkpoint("llama longrope both", **one), "my/model")
    assert {each.key for each in found if each.short is not None} == set()
    assert {each.key for each in found if each.verdict != "same"} == {"llama.cpp"}


def test_programs_with_a_command_for_each_length_are_named_and_one_without_is_refused() -> None:
    found = readings_of(checkpoint("llama longrope both"), "my/model")
    chosen = ["transformers", "vllm", "llama.cpp"]
    refuse_wrong(found, chosen)
    told = cautions(found, chosen)
    assert [each.split(":")[0] for each in told] == ["vLLM 0.30 and later", "llama.cpp"]
    assert "inputs up to 1,024 tokens: llama-server -m FILE.gguf -c 1024" in told[1]
    with pytest.raises(
        RopewalkError, match=r"mlx-lm 0\.32 computes .* make longrope's short_factor equal to"
    ):
        refuse_wrong(found, ["mlx-lm"])
    behind = wrong_servers(found, 4096)
    assert [each.split(":")[0] for each in behind[:-1]] == [
        f"served by {program}"
        for program in ("vLLM 0.30 and later", "vLLM 0.22 to 0.29", "SGLang 0.5", "llama.cpp", "mlx-lm 0.32")
    ]
    assert behind[-1].startswith("one server is correct for inputs of every length if short_factor")


def test_sentences_name_lengths_and_options() -> None:
    told = sentences(readings_of(checkpoint("llama linear both"), "my/model"), 4096)
    assert told[0].endswith("mlx-lm 0.32: the same frequencies")
    assert (
        "vLLM 0.30 and later serves 16,384 tokens by default, not 4,096; to serve 4,096, run: vllm serve my/model "
        "--max-model-len 4096" in told
    )
    odd = sentences(readings_of(checkpoint("llama yarn-attention both"), "my/model"), 4096)
    assert any(each.startswith("SGLang 0.5: attention factor 1.13863, not 1") for each in odd)
    assert any("correct with: ropewalk export my/model --gguf CONVERTED.gguf" in each for each in odd)


def test_a_program_that_reads_it_wrongly_is_refused_by_name() -> None:
    found = readings_of(checkpoint("llama yarn-attention both"), "my/model")
    refuse_wrong(found, ["transformers", "vllm", "vllm-0.22", "llama.cpp"])
    with pytest.raises(RopewalkError, match=r"SGLang 0\.5 computes this RoPE wrongly \(attention factor"):
        refuse_wrong(found, ["vllm", "sglang"])
    with pytest.raises(RopewalkError, match="unknown program 'ollama'; choose from transformers, "):
        refuse_wrong(found, ["ollama"])


def test_a_file_without_a_length_is_refused(tmp_path: Path) -> None:
    raw = {
        key: value
        for key, value in record()["configs"]["llama theta both"].items()
        if key not in ("max_position_embeddings", "model_type")
    }
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "unheard_of"}))
    with pytest.raises(RopewalkError, match="states no max_position_embeddings"):
        readings(str(tmp_path))
