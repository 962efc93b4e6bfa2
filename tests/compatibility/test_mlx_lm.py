"""mlx-lm 0.32.2 as recorded with its own models."""

import pytest

from ropewalk.compatibility.mlx_lm import BASES, MLX_LM
from ropewalk.compatibility.reader import Checkpoint, RefusedConfigError, UnreadConfigError
from ropewalk.rope import Default
from tests.compatibility.recorded import checkpoint, differing, only, record


def test_it_computes_what_mlx_lm_computed() -> None:
    assert differing(MLX_LM, "mlx-lm") == []


def test_a_llama_without_the_older_keys_runs_the_default_base() -> None:
    assert only(MLX_LM.methods(checkpoint("llama yarn newer"))) == Default(16, BASES["llama"])
    assert only(MLX_LM.methods(checkpoint("qwen3 yarn newer"))).name == "yarn"


def test_a_type_that_needs_the_base_stops_without_it() -> None:
    newer = {**record()["configs"]["llama theta newer"], "model_type": "granite"}
    with pytest.raises(RefusedConfigError, match="needs rope_theta at the top level"):
        MLX_LM.methods(checkpoint("llama theta newer", model_type="granite"))
    assert only(
        MLX_LM.methods(checkpoint("llama theta newer", model_type="granite", rope_theta=5e4))
    ) == Default(16, newer["rope_parameters"]["rope_theta"])


def test_types_without_scaling_run_the_base_alone() -> None:
    read = checkpoint("llama yarn older", model_type="mixtral")
    assert only(MLX_LM.methods(read)) == Default(16, 5e4)


def test_longrope_needs_the_original_length_inside_the_mapping() -> None:
    read = checkpoint("llama longrope older")
    scaling = {key: value for key, value in read.stated["rope_scaling"].items() if key[:8] != "original"}
    without = Checkpoint({**read.stated, "rope_scaling": scaling}, read.completed)
    with pytest.raises(RefusedConfigError, match="original_max_position_embeddings inside"):
        MLX_LM.methods(without)


def test_other_types_were_not_read() -> None:
    with pytest.raises(UnreadConfigError, match="stablelm"):
        MLX_LM.methods(checkpoint("llama theta both", model_type="stablelm"))
