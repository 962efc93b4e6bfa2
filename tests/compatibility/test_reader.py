"""The parts that readers share."""

import pytest

from ropewalk.compatibility.reader import RefusedConfigError, UnreadConfigError, refuse_unknown, transformed
from ropewalk.compatibility.table import checkpoint_of
from ropewalk.rope import Default, Linear
from tests.compatibility.recorded import checkpoint

BY_LAYER = {
    "model_type": "gemma3_text", "head_dim": 16, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 1, "num_hidden_layers": 6, "max_position_embeddings": 4096,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


def test_a_method_of_layer_types_is_not_one_of_all_layers() -> None:
    assert checkpoint("llama theta newer").method() == Default(16, 5e4)
    with pytest.raises(UnreadConfigError, match="with 2 layer types"):
        checkpoint_of(BY_LAYER).method()


def test_an_unknown_type_is_refused_by_name() -> None:
    refuse_unknown({None: Default(16, 5e4)}, (Default,))
    with pytest.raises(RefusedConfigError, match="rope type 'linear'"):
        refuse_unknown({None: Linear(16, 5e4, 2.0)}, (Default,))


def test_a_change_reaches_the_method_of_each_layer_type() -> None:
    found = transformed(checkpoint_of(BY_LAYER), lambda method: Default(method.rotary_dim, 7.0))
    assert found == dict.fromkeys(("full_attention", "sliding_attention"), Default(16, 7.0))
