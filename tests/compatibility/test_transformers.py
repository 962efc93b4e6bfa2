"""transformers 4.57 as recorded. What version 5 computes is the meaning of a config; tests/rope compares with it."""

import json

import pytest

from ropewalk.compatibility.reader import RefusedConfigError, UnreadConfigError
from ropewalk.compatibility.table import checkpoint_of
from ropewalk.compatibility.transformers import TRANSFORMERS_4, TRANSFORMERS_5
from ropewalk.rope import Default
from tests.compatibility.recorded import checkpoint, differing, only, record
from tests.compatibility.test_reader import BY_LAYER
from tests.places import ROOT


def test_it_computes_what_transformers_4_computed() -> None:
    assert differing(TRANSFORMERS_4, "transformers-4") == []


def test_version_4_runs_the_default_base_without_the_older_keys() -> None:
    assert only(TRANSFORMERS_4.methods(checkpoint("llama yarn newer"))) == Default(16, 1e4)
    assert only(TRANSFORMERS_5.methods(checkpoint("llama yarn newer"))).name == "yarn"


def test_version_4_reads_gemma_3_with_its_two_bases() -> None:
    read = checkpoint_of({**BY_LAYER, "rope_theta": 1e6, "rope_local_base_freq": 1e4})
    assert TRANSFORMERS_4.methods(read) == {
        "full_attention": Default(16, 1e6),
        "sliding_attention": Default(16, 1e4),
    }


def test_what_was_not_read_is_not_guessed() -> None:
    raw = record()["configs"]["llama theta newer"]
    for changes, words in (
        ({"model_type": "glm4_moe_lite"}, "code for glm4_moe_lite"),
        ({"rope_parameters": {**raw["rope_parameters"], "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ):
        changed = {**raw, **changes, "rope_theta": 5e4}
        with pytest.raises(UnreadConfigError, match=words):
            TRANSFORMERS_4.methods(checkpoint_of(changed))


def test_version_4_knows_no_proportional() -> None:
    raw = {**record()["configs"]["llama theta newer"]}
    raw["rope_parameters"] = {"rope_type": "proportional", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
    with pytest.raises(RefusedConfigError, match="proportional"):
        TRANSFORMERS_4.methods(checkpoint_of(raw))


PHI3 = json.loads((ROOT / "tests/configs/phi-3-mini-128k-instruct.json").read_text(encoding="utf-8"))


def test_version_4_takes_three_keys_for_phi3_and_no_other() -> None:
    assert set(TRANSFORMERS_4.methods(checkpoint_of(PHI3))) == {None}
    scaling = PHI3["rope_scaling"]
    named = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": "longrope"}
    for changed in ({**scaling, "factor": 32.0}, named):
        with pytest.raises(RefusedConfigError, match="needs 'type', short_factor and long_factor"):
            TRANSFORMERS_4.methods(checkpoint_of({**PHI3, "rope_scaling": changed}))
