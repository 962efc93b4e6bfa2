"""llama.cpp: facts that ``benchmarks.llama_cpp`` and tests/models/test_gguf.py measure with the program itself."""

import math

import pytest

from ropewalk.compatibility.llama_cpp import LLAMA_CPP
from ropewalk.compatibility.reader import RefusedConfigError, UnreadConfigError
from ropewalk.compatibility.table import difference
from ropewalk.rope import Default, Proportional
from tests.compatibility.recorded import checkpoint, only


def test_a_base_and_linear_need_nothing() -> None:
    for name in ("llama theta newer", "llama linear newer", "qwen3 linear newer"):
        read = checkpoint(name)
        assert only(LLAMA_CPP.methods(read)) == read.method()


def test_longrope_of_a_llama_runs_unscaled_and_export_gguf_corrects_it() -> None:
    read = checkpoint("llama longrope newer")
    assert only(LLAMA_CPP.methods(read)) == Default(16, 5e4)
    assert LLAMA_CPP.option("m", read) == "ropewalk export m --gguf CONVERTED.gguf --out FILE.gguf"
    # Qwen's files have no room for the factors.
    assert LLAMA_CPP.option("m", checkpoint("qwen3 longrope newer")) is None


def test_yarn_has_the_usual_ramp_and_the_formula() -> None:
    odd = only(LLAMA_CPP.methods(checkpoint("llama yarn-ramp newer")))
    assert (odd.beta_fast, odd.beta_slow, odd.truncate) == (32, 1, True)
    dropped = only(LLAMA_CPP.methods(checkpoint("llama yarn-attention newer")))
    assert math.isclose(dropped.attention_factor, 0.1 * math.log(4) + 1)


def test_the_converter_takes_8192_tokens_for_the_original_length_of_llama3() -> None:
    read = checkpoint("llama llama3 newer")
    assert only(LLAMA_CPP.methods(read)).original_max_position_embeddings == 8192
    entry = {**read.stated["rope_parameters"], "original_max_position_embeddings": 8192}
    usual = checkpoint("llama llama3 newer", rope_parameters=entry, max_position_embeddings=32768)
    assert difference(usual.method(), only(LLAMA_CPP.methods(usual)), 32768) == ""
    assert only(LLAMA_CPP.methods(checkpoint("qwen2 llama3 newer"))) == Default(16, 5e4)


def test_what_it_lacks_and_what_was_not_tried() -> None:
    with pytest.raises(UnreadConfigError, match="'yarn' was not tested with the model type 'granite'"):
        LLAMA_CPP.methods(checkpoint("llama yarn newer", model_type="granite"))
    entry = {"rope_type": "proportional", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
    read = checkpoint("llama theta newer", rope_parameters=entry)
    assert isinstance(read.method(), Proportional)
    with pytest.raises(RefusedConfigError, match="proportional"):
        LLAMA_CPP.methods(read)
