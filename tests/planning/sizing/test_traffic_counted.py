"""Communication on paper against bytes that ranks sent."""

import pytest

from ropewalk.models.config import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.planning.sizing.traffic import fsdp_bytes, ulysses_bytes
from tests.planning.sizing.sizing_cases import SMALL, counted_fsdp_bytes, counted_ulysses_bytes

SHAPE = ModelShape.from_config(ModelConfig(SMALL))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_sends_what_the_formula_says(four_ranks, tied, checkpointing):
    shape = ModelShape.from_config(ModelConfig({**SMALL, "tie_word_embeddings": tied}))
    expected = fsdp_bytes(shape.units, MeshShape(shard=4), 2)
    assert four_ranks.run(counted_fsdp_bytes, tied, checkpointing) == [expected] * 4


@pytest.mark.parametrize(("rows", "length"), [(1, 16), (2, 21)])
def test_ulysses_sends_what_the_formula_says(four_ranks, rows, length):
    one_layer = ModelShape.from_config(ModelConfig({**SMALL, "num_hidden_layers": 1}))
    for places, sent in four_ranks.run(counted_ulysses_bytes, rows, length):
        assert places == -(-length // 4)
        assert sent == ulysses_bytes(one_layer, 4, rows * places, 4, checkpointing=False)
