"""The table of supported families: it knows every family of transformers, and says what their models do."""

import functools
import importlib
import json

import pytest
from transformers import CONFIG_MAPPING

from ropewalk.errors import RopewalkError
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.layers import INDEXERS
from ropewalk.models.support import COLUMNS, ModelsSettings, supported
from ropewalk.testing import Ranks
from ropewalk.versions import older_transformers
from tests.checkpoint_cases import CASES, path_of
from tests.models import every_family
from tests.places import ROOT
from tests.training.family_cases import two_steps_wrongly
from tests.versions import NEWEST

SAMPLE = (
    "longcat_flash",
    "granite_swa",
    "moshi",
    "emu3",
    "ernie4_5_moe",
    "gemma3n_text",
    "olmo_hybrid",
    "phimoe",
)
"""Families of kinds that no other test trains on ranks: two attentions in a layer, two rotary modules, a config that
only holds the decoder's, routers in float32, buffers that a part of the model computes, layers with a state; refused
ones."""


def test_every_family_of_transformers_is_known():
    """Where this fails: python scripts/supported_models.py NAME ..., and read what it says."""
    table = supported(ModelsSettings())
    assert set(every_family.families()) <= {*table.families, *table.without_rope}
    assert not set(table.families) & set(table.without_rope)


def test_tiny_models_have_every_kind_of_layer_that_their_families_have():
    """Where this fails, a *tested* row says nothing of some layers: add them to ``OVERRIDES``, and try the family."""
    missing, published = {}, published_kinds()
    for name, cells in supported(ModelsSettings()).families.items():
        if name not in CONFIG_MAPPING or all(cell.status == "refused" for cell in cells.values()):
            continue
        kinds = every_family.known_kinds(name) | published.get(name, set())
        text = every_family.tiny_config(name).get_text_config()
        lacking = kinds - every_family.kinds_of(text)
        if getattr(text, "layer_types", None) is None:
            # All layers have a window, or none has.
            lacking -= {"full_attention"}
        if lacking:
            missing[name] = lacking
    assert missing == every_family.NAMED_ALONE


def published_kinds():
    """The layer types of the published configs in ``tests/configs``, by model type."""
    found = {}
    for name, case in CASES.items():
        if case.config_class is not None:
            config = read_model_config(str(path_of(name)))
            found.setdefault(config.model_type, set()).update(layer.kind for layer in config.layers)
    return found


def test_no_family_is_silently_wrong():
    table = supported(ModelsSettings())
    for name, cells in table.families.items():
        assert list(cells) == list(COLUMNS)
        for support in cells.values():
            assert support.status in ("tested", "refused"), name
            assert support.status == "tested" or support.reason, name


def test_what_trains_on_packed_rows_runs_on_parts_of_rows():
    for name, cells in supported(ModelsSettings()).families.items():
        parts = "refused" if name in INDEXERS else cells["packed_training"].status
        assert cells["context_parallelism"].status == parts


def test_one_family_alone():
    result = supported(ModelsSettings(family="qwen3"))
    assert list(result.families) == ["qwen3"]
    assert json.loads(json.dumps(result.to_json()))["families"]["qwen3"]["packed_training"] == {
        "status": "tested",
        "reason": "",
    }


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen33", "did you mean qwen3"),
        ("gpt2", "gpt2 has no RoPE"),
        ("?", "`ropewalk models` lists the known types"),
    ],
)
def test_an_unknown_family_is_refused(family, message):
    with pytest.raises(RopewalkError, match=message):
        supported(ModelsSettings(family=family))


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_family_without_other_processes_is_as_the_table_says(family):
    found = every_family.support_of(family)
    expected = supported(ModelsSettings(family=family)).to_json()["families"][family]
    for column in ("context_parallelism", "distributed_training"):
        del found[column], expected[column]
    assert found == expected


def statuses(cells):
    return {column: cell["status"] for column, cell in cells.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", SAMPLE)
def test_the_table_is_what_the_models_do(family, two_ranks: Ranks):
    found = every_family.support_of(family, two_ranks)
    expected = supported(ModelsSettings(family=family)).to_json()["families"][family]
    assert statuses(found) == statuses(expected)
    # An older transformers may fail what is refused in another place.
    if older_transformers(NEWEST) is None:
        assert found == expected


def test_a_wrong_row_would_be_noticed(monkeypatch):
    """With a window of one token more in our attention alone, the comparison says WRONG."""
    hooks = importlib.import_module("ropewalk.models.attention.hooks")
    asked = hooks.attention_options_of

    def one_more(module, layout, options):
        found = asked(module, layout, options)
        return hooks.AttentionOptions(found.scale, found.softcap, found.window and found.window + 1)

    monkeypatch.setattr(hooks, "attention_options_of", one_more)
    plain = every_family.tiny_model("mistral", every_family.torch.float64)
    found = every_family.packed_training("mistral", plain)
    assert (found["status"], "off by" in found["reason"]) == ("WRONG", True)


@pytest.mark.slow
def test_a_wrong_step_would_be_noticed(monkeypatch, two_ranks: Ranks):
    """With padding among the tokens that the ranks balance, the comparison says WRONG."""
    wrong = functools.partial(two_steps_wrongly, "padding counts")
    monkeypatch.setattr(every_family, "two_steps_on_ranks", wrong)
    packed = every_family.entry("tested")
    found = every_family.distributed_training("mixtral", packed, two_ranks)
    assert (found["status"], "is off by" in found["reason"]) == ("WRONG", True)


def test_the_table_is_in_the_package():
    assert (ROOT / "src" / "ropewalk" / "models" / "families.json").is_file()
