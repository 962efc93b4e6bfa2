"""What other programs make of a RoPE: each sentence where its fact applies, and nowhere else."""

import math

import pytest

from ropewalk.rope import (
    Default,
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    RopeMethod,
    Yarn,
    config_entries,
    longrope_attention_factor,
)
from ropewalk.rope.config import notes_on

PUBLISHED = longrope_attention_factor(8, 4096)
LONG = LongRope(8, 1e4, (1.0,) * 4, (1.0, 2.0, 3.0, 4.0), PUBLISHED, 4096)


def told(method: RopeMethod, context: int = 32768, model_type: str | None = "llama") -> str:
    return "; ".join(method.reader_notes(context, model_type))


def test_one_number_is_read_by_all() -> None:
    assert told(Default(8, 5e5)) == (
        "transformers, vLLM, SGLang, llama.cpp and mlx-lm read it: rope_theta is one number"
    )
    assert told(DynamicNtk(8, 1e4, 2.0, 4096)) == ""


def test_a_length_that_would_be_multiplied_twice_is_named() -> None:
    assert "--max-model-len 32768 (vLLM), or a context length of 32768 (SGLang)" in told(Linear(8, 1e4, 8.0))


@pytest.mark.parametrize(
    ("change", "context", "words"),
    [
        ({}, 32768, []),
        ({}, 16384, ["vLLM serves 32768 tokens", "give --max-model-len 16384"]),
        ({"attention_factor": 0.1 * math.log(8) + 1}, 32768, ["llama.cpp ignores"]),
        (
            {"attention_factor": 1.0},
            32768,
            ["SGLang and mlx-lm ignore", "by 1 here, by 1.20794", "llama.cpp"],
        ),
        (
            {"mscale": 1.0, "mscale_all_dim": 1.0},
            32768,
            ["0.25.0 ignores mscale and mscale_all_dim", "by 1 here"],
        ),
    ],
)
def test_yarn_is_read_but_for_its_attention_factor(
    change: dict[str, float], context: int, words: list[str]
) -> None:
    found = told(Yarn(8, 1e4, 8.0, 4096, **change), context)
    assert all(word in found for word in words)
    assert bool(found) == bool(words)
    assert ("SGLang" in found) == (change.get("attention_factor") == 1.0)


def test_llama3_reaches_llama_cpp_from_three_model_types() -> None:
    method = Llama3(8, 5e5, 8.0, 1.0, 4.0, 8192)
    for model_type in ("llama", "mistral", "mixtral"):
        assert told(method, model_type=model_type) == ""
    for model_type in ("qwen3", None):
        assert "not llama.cpp" in told(method, model_type=model_type)


def test_longrope_of_a_llama_is_not_for_llama_cpp() -> None:
    assert "drops these factors silently, and the model would run default RoPE" in told(LONG)
    assert "drops" not in told(LONG, model_type="qwen3")
    assert "not llama.cpp: its converter is known to write longrope's factors only for phi3" in told(
        LONG, model_type="qwen3"
    )
    phi = told(LONG, model_type="phi3")
    assert "not llama.cpp" not in phi
    assert "llama.cpp selects the factors by the context that it allocates; vLLM stops at 4096" in phi
    odd = LongRope(8, 1e4, (1.0,) * 4, (1.0, 2.0, 3.0, 4.0), 1.0, 4096)
    assert f"with the attention factor {PUBLISHED:.6g} of the formula" in told(odd, model_type="phi3")


def test_factors_that_change_with_the_length_are_named_and_others_are_not() -> None:
    changing, same = told(LONG), told(LongRope(8, 1e4, (2.0,) * 4, (2.0,) * 4, PUBLISHED, 4096))
    for sentence in (
        "and then also runs short sequences with the long factors",
        "generate() changes the factors when a sequence passes 4096 tokens",
    ):
        assert sentence in changing
        assert sentence not in same


def test_notes_on_a_config_are_those_on_its_methods() -> None:
    config = {
        "model_type": "llama",
        "head_dim": 8,
        "max_position_embeddings": 32768,
        **config_entries(LONG, 8),
    }
    assert notes_on(config) == LONG.reader_notes(32768, "llama")
    assert notes_on({"model_type": "vision", "text_config": config}) == notes_on(config)
    layers = {"full_attention": Default(8, 1e6), "sliding_attention": Default(8, 1e4)}
    both = {
        "model_type": "llama",
        "head_dim": 8,
        "max_position_embeddings": 32768,
        **config_entries(layers, 8),
    }
    (note,) = notes_on(both)
    assert note.startswith("the layer types full_attention and sliding_attention have different RoPE")
    same = {**both, **config_entries(dict.fromkeys(layers, Default(8, 1e6)), 8)}
    assert notes_on(same) == Default(8, 1e6).reader_notes(32768, "llama")
    scaled = {**both, **config_entries({**layers, "full_attention": LONG}, 8)}
    assert notes_on(scaled) == [note, *LONG.reader_notes(32768, "llama")]
