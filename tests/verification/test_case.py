"""From a recipe to what is verified: rows of the user's own documents, and the model or its first layers."""

import json
import os
import shutil
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ropewalk.verification.case as cases
from ropewalk.attention.choices import KEEP_FROM
from ropewalk.attention.kept import Keeping
from ropewalk.attention.layout import IGNORED, PackedLayout, Row, next_token_labels
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.errors import RopewalkError
from ropewalk.parallel import MeshShape
from ropewalk.rope import RotaryEmbedding
from ropewalk.training import Recipe
from ropewalk.verification.case import _shortened, prepare
from ropewalk.verification.checks.documents import packed_equals_separate


@pytest.fixture
def recipe(tmp_path):
    documents = tmp_path / "documents.jsonl"
    text = "for strand in yarn:\n    rope.lay(strand, twist=left)\n"
    documents.write_text("".join(json.dumps({"text": text * (1 + n % 4)}) + "\n" for n in range(24)))
    values = {
        "model": "embedded",
        "output": str(tmp_path / "run"),
        "data": {"sources": [str(documents)]},
        "stages": [{"context": 1024, "steps": 1}],
    }
    return values


def prepared(values, tmp_path, **options):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return prepare(Recipe.model_validate(values), scratch, **options)


def test_rows_hold_several_documents_of_the_user(recipe, tmp_path):
    case, remarks, mesh = prepared(recipe, tmp_path, rows=3, length=64)
    assert (len(case.rows), case.length, case.context, mesh.world_size) == (3, 64, 1024, 1)
    assert remarks == ["verified with rows of 64 tokens instead of the stage's 1,024"]
    assert case.rope.rope_theta > 10_000
    for row in case.rows:
        assert len(row.layout.document_lengths) > 1
        assert row.layout.pattern == "anchor"


def test_the_length_is_what_a_cpu_computes(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "WORK", 1e6 * 2 * 100)
    case, _, _ = prepared(recipe, tmp_path, rows=2)
    assert case.length == 64


def test_tags_are_no_targets(recipe, tmp_path):
    recipe["data"]["tag"] = "strand:"
    case, _, _ = prepared(recipe, tmp_path, rows=2, length=64)
    assert not all(bool(trained.all()) for trained in case.trained)


def test_auto_takes_its_first_candidate(recipe, tmp_path):
    recipe["stages"][0]["rope"] = "auto"
    _, remarks, _ = prepared(recipe, tmp_path, rows=2, length=64)
    assert (
        "rope auto chooses the base during the run; verified with its first candidate, critical-dimension"
        in remarks
    )


def test_the_first_layers_are_those_of_the_model(recipe, tmp_path):
    case, remarks, _ = prepared(recipe, tmp_path, rows=2, length=64, layers=2)
    assert "verified with only the first 2 layers of 5" in remarks
    load = transformers.AutoModelForCausalLM.from_pretrained
    cut, whole = load(case.model), load(demo_model_path())
    assert cut.config.num_hidden_layers == 2
    state = whole.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in cut.state_dict().items())


def test_one_layer_is_said_in_the_singular(recipe, tmp_path):
    _, remarks, _ = prepared(recipe, tmp_path, rows=2, length=64, layers=1)
    assert "verified with only the first layer of 5" in remarks


def test_the_stages_memory_settings_are_verified(recipe, tmp_path):
    recipe["stages"][0] |= {
        "rows_per_batch": 4,
        "gradient_checkpointing": True,
        "offload_activations": True,
        "offload_optimizer": True,
    }
    case, remarks, _ = prepared(recipe, tmp_path, rows=2, length=64)
    assert (case.rows_per_batch, case.gradient_checkpointing, case.offload_activations) == (4, True, True)
    assert (case.keeping, case.offload_optimizer) == (Keeping(KEEP_FROM), True)
    assert "verified with micro-batches of 2 rows instead of the stage's 4" in remarks


def test_micro_batches_have_two_rows_at_least(recipe, tmp_path):
    case, _, _ = prepared(recipe, tmp_path, rows=3, length=64)
    assert not case.gradient_checkpointing
    whole = SimpleNamespace(data_rank=0, shape=MeshShape(sequence=2))
    assert [len(rows) for rows in case.batches(whole)] == [2, 1]


@pytest.mark.parametrize("layers", [None, 1])
def test_weights_that_cannot_be_read_are_refused(recipe, tmp_path, layers):
    recipe["model"] = str(shutil.copytree(demo_model_path(), tmp_path / "model"))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(RopewalkError, match=r"cannot (load the model in|take the first layer of) .*model: "):
        prepared(recipe, tmp_path, rows=2, length=64, layers=layers)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.layers.0.mlp.up_proj.weight"), r"lacks the weight .*0\.mlp\.up_proj\.weight"),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.bias": torch.ones(4)}),
            r"has the weight model\.layers\.0\.mlp\.up_proj\.bias, which the model .* does not use",
        ),
        (
            lambda w: w.update({"model.norm.weight": w["model.norm.weight"].to(torch.int8)}),
            r"the weight model\.norm\.weight as I8 numbers",
        ),
    ],
)
def test_first_layers_with_other_weights_are_refused(recipe, tmp_path, change, said):
    folder = shutil.copytree(demo_model_path(), tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    recipe["model"] = str(folder)
    with pytest.raises(RopewalkError, match=said):
        prepared(recipe, tmp_path, rows=2, length=64, layers=1)


def test_a_model_that_does_not_fit_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 12)
    with pytest.raises(
        RopewalkError,
        match=r"about 0 GiB of memory in float64.*verify fewer than 5 of the model's layers with --layers",
    ):
        prepared(recipe, tmp_path, rows=2, length=64)


def test_too_few_documents_are_refused(recipe, tmp_path):
    with pytest.raises(
        RopewalkError, match=r"the documents fill only 1 row of 1024 tokens, but verify needs 9 rows"
    ):
        prepared(recipe, tmp_path, rows=9, length=1024)


@pytest.mark.parametrize("length", [7, 24, 31, 48])
def test_a_shortened_row_is_the_beginning_of_the_row(length):
    layout = PackedLayout.from_segments([9, 14, 3, 10, 11], [1, 0, 2, 1, 0], "anchor", 1, "reset")
    ids = torch.arange(48)
    trained = ids % 5 != 0
    row = Row(ids, next_token_labels(ids, layout, trained), layout)
    short = _shortened(row, length)
    assert short.layout.document_ids.tolist() == layout.document_ids[:length].tolist()
    assert short.layout.position_ids.tolist() == layout.position_ids[:length].tolist()
    assert torch.equal(short.layout.dense_mask(), layout.dense_mask()[:length, :length])
    for place, label in enumerate(short.labels.tolist()):
        whole = int(row.labels[place])
        # Ids count the tokens, so a target says where it lies.
        assert label == (whole if whole < length else IGNORED)


def the_longest_of_four(stack):
    """All rows have the long factors, whatever their own lengths."""
    own = RotaryEmbedding.pinned
    stack.enter_context(patch.object(RotaryEmbedding, "pinned_rows", lambda self, lengths: own(self, 1024)))


def test_every_second_row_of_a_stage_with_short_rows_is_short(recipe, tmp_path):
    recipe["stages"][0] |= {"context": 1024, "short_rows": 0.5, "steps": 2, "pattern": "full"}
    case, remarks, _ = prepared(recipe, tmp_path, rows=4, length=512)
    assert [row.layout.pattern for row in case.rows] == ["full", "intra_document"] * 2
    original = case.rope.original_max_position_embeddings
    assert original == 256
    assert [row.layout.rope_length <= original for row in case.rows] == [False, True] * 2
    assert not any("original length" in remark for remark in remarks)
    assert packed_equals_separate(case).passed
    # A row that has the factors of another length is not its documents.
    with ExitStack() as stack:
        the_longest_of_four(stack)
        assert not packed_equals_separate(case).passed


def test_rows_within_the_original_length_say_that_both_ropes_were_not_verified(recipe, tmp_path):
    recipe["stages"][0] |= {"context": 1024, "short_rows": 0.5, "steps": 2}
    _, remarks, _ = prepared(recipe, tmp_path, rows=2, length=128)
    assert any(
        "rows of 128 tokens are not longer than the original length of 256" in each for each in remarks
    )
