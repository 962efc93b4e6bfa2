"""SGLang 0.5.23 as recorded with its own modules."""

import pytest

from ropewalk.compatibility.reader import UnreadConfigError
from ropewalk.compatibility.sglang import SGLANG
from ropewalk.compatibility.table import checkpoint_of
from tests.compatibility.recorded import checkpoint, differing, only
from tests.compatibility.test_reader import BY_LAYER


def test_it_computes_what_sglang_computed() -> None:
    assert differing(SGLANG, "sglang") == []


def test_it_drops_the_attention_factor_and_reads_mscales_of_0() -> None:
    assert only(SGLANG.methods(checkpoint("llama yarn-attention newer"))).attention_factor > 1.1
    assert only(SGLANG.methods(checkpoint("llama yarn-zero-mscales newer"))).attention_factor == 1.0


def test_it_multiplies_the_length_of_linear() -> None:
    read = checkpoint("llama linear newer")
    assert SGLANG.served(read) == 4 * 4096
    assert SGLANG.launch("m", read) == "python -m sglang.launch_server --model-path m --context-length 4096"


def test_layer_types_were_not_read() -> None:
    with pytest.raises(UnreadConfigError):
        SGLANG.methods(checkpoint_of(BY_LAYER))
