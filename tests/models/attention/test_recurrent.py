"""Recurrent layers in packed rows: each run is computed as that run alone, and no state goes from one into another."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from ropewalk import PackedLayout
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.attention import recurrent as recurrent_layers
from ropewalk.models.attention.recurrent import (
    PACKED_SINCE,
    mixers_of,
    refuse_older_transformers,
)
from ropewalk.models.config.layers import MIXERS, SHORT_CONVOLUTION, WITHOUT_ROPE, Mixer
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach, checkpoint_activations, load_model
from ropewalk.parallel import MeshShape, SequenceGroups, ShardedLayouts
from ropewalk.rope import Default, RotaryEmbedding, methods_from_config, replace_methods
from ropewalk.training.preflight import refuse_on_mesh
from tests.marks import slow_after
from tests.models.families import HYBRIDS, tiny_model
from tests.versions import missing, needs_transformers, pretend_transformers

LENGTHS = (23, 5, 40, 17)
"""Documents longer than the chunks of the recurrences, of two sizes for the batches of runs."""
ROUNDING = 256 * 2.0**-23
"""Of the largest value: norms, rotary angles and recurrent states of transformers are float32 in any model."""


def attached(plain, exact_rope=False):
    model = copy.deepcopy(plain)
    family = model.config.model_type
    needs_transformers(PACKED_SINCE.get(family, "0.0"), f"a packed row of {family}")
    attach(model, engine="sdpa", exact_rope=exact_rope)
    return model


def apart_from_the_anchor(model, anchor_length):
    """Plain transformers, whose recurrent mixers see the first tokens and the others as two sequences of their own."""
    model = copy.deepcopy(model)
    for mixer in mixers_of(model, ModelConfig.of(model.config)):

        def forward(hidden_states, *args, own=mixer.forward, **kwargs):
            parts = [
                own(part, *args, **kwargs)
                for part in (hidden_states[:, :anchor_length], hidden_states[:, anchor_length:])
            ]
            if isinstance(parts[0], tuple):
                return torch.cat([part[0] for part in parts], 1), None
            return torch.cat(parts, 1)

        mixer.forward = forward
    return model


def runs_of(layout):
    """The tokens that plain transformers is given for each document, and how many of them are an anchor."""
    if layout.pattern == "full":
        return [(torch.arange(layout.total_length), 0)]
    documents = range(int(layout.document_ids.max()) + 1)
    mine = [torch.nonzero(layout.document_ids == document).flatten() for document in documents]
    anchor = torch.arange(layout.anchor_length if layout.pattern == "anchor" else 0)
    return [(torch.cat([anchor, tokens]), len(anchor)) for tokens in mine]


def compare(plain, layout, seed=1):
    """Largest difference of logits and gradients between a packed row and each document alone, in units of size."""
    ours = attached(plain)
    oracle = plain
    if layout.pattern == "anchor":
        oracle = apart_from_the_anchor(plain, layout.anchor_length)
    torch.manual_seed(seed)
    ids = torch.randint(3, 90, (1, layout.total_length))
    logits = ours(input_ids=ids, layout=layout).logits[0]
    cotangent = torch.randn_like(logits)
    loss, mine, worst = torch.zeros((), dtype=logits.dtype), torch.zeros((), dtype=logits.dtype), 0.0
    size = float(logits.detach().abs().max())
    for tokens, anchor_length in runs_of(layout):
        alone = oracle(
            input_ids=ids[:, tokens],
            position_ids=layout.position_ids[tokens][None],
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            use_cache=False,
        ).logits[0][anchor_length:]
        tokens = tokens[anchor_length:]
        worst = max(worst, float((logits[tokens] - alone).detach().abs().max()) / size)
        loss = loss + (alone * cotangent[tokens]).sum()
        mine = mine + (logits[tokens] * cotangent[tokens]).sum()
    mine.backward()
    loss.backward()
    gradients = [(p.grad, q.grad) for p, q in zip(ours.parameters(), oracle.parameters(), strict=True)]
    assert all((p is None) == (q is None) for p, q in gradients)
    pairs = [(p, q) for p, q in gradients if p is not None]
    scale = max(float(q.abs().max()) for _, q in pairs)
    for parameter in plain.parameters():
        parameter.grad = None
    return worst, max(float((p - q).abs().max()) for p, q in pairs) / scale


@pytest.mark.parametrize("pattern", slow_after(1, ["anchor", "full", "intra_document"]))
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_packed_row_equals_each_document_alone(family, pattern):
    """Outputs and gradients in float64. Under anchor, attention sees [anchor; document], a recurrence the document."""
    positions = "continuous" if pattern == "full" else "reset"
    layout = PackedLayout.from_lengths(LENGTHS, pattern, int(pattern != "intra_document"), positions)
    outputs, gradients = compare(tiny_model(family, torch.float64, sharp=True), layout)
    assert outputs <= ROUNDING
    assert gradients <= ROUNDING


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("pattern", ["intra_document", "anchor"])
def test_interleaved_documents_of_continuous_positions_equal_each_alone(family, pattern):
    layout = PackedLayout.from_segments([9, 33, 4, 7, 12], [1, 0, 2, 1, 0], pattern, 2)
    outputs, gradients = compare(tiny_model(family, torch.float64, sharp=True), layout)
    assert max(outputs, gradients) <= ROUNDING


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_that_does_not_restart_is_noticed(family, monkeypatch):
    """The same comparison with recurrent layers that take the row for one run fails by far."""
    monkeypatch.setattr(recurrent_layers, "run_batches", lambda layouts, device: None)
    layout = PackedLayout.from_lengths(LENGTHS, "intra_document", 0, "reset")
    outputs, gradients = compare(tiny_model(family, torch.float64, sharp=True), layout)
    assert outputs > 100 * ROUNDING
    assert gradients > 100 * ROUNDING


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "bamba", "minimax"])
def test_checkpointed_layers_restart_when_they_are_computed_again(family):
    """In the backward no model call is current: the layout comes to each layer by its own keywords."""
    plain = attached(tiny_model(family, torch.float64, sharp=True)).train()
    again = copy.deepcopy(plain)
    checkpoint_activations(again)
    layout = PackedLayout.from_lengths(LENGTHS, "anchor")
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (1, layout.total_length))
    for model in (plain, again):
        model(input_ids=ids, layout=layout).logits.square().sum().backward()
    for (name, mine), theirs in zip(again.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name


def test_rows_of_a_batch_have_layouts_of_their_own():
    model = attached(tiny_model("qwen3_next", torch.float64, sharp=True))
    layouts = [
        PackedLayout.from_lengths([10, 30, 19], "anchor"),
        PackedLayout.from_lengths([60], "full", 0),
        PackedLayout.from_segments([20, 5, 34], [1, 0, 1], "intra_document"),
    ]
    ids = torch.randint(3, 90, (3, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = model(input_ids=ids, layout=layouts).logits
        alone = torch.cat(
            [
                model(input_ids=row[None], layout=layout).logits
                for row, layout in zip(ids, layouts, strict=True)
            ]
        )
    assert float((together - alone).abs().max()) <= ROUNDING * float(alone.abs().max())


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "granitemoehybrid", "minimax"])
def test_a_call_without_a_layout_is_transformers_own(family):
    plain = tiny_model(family, sharp=True)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(attached(plain)(ids).logits, attached(plain)(ids, use_cache=False).logits)
        expected = plain.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(attached(plain).generate(ids, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_a_group_of_one_rank_holds_whole_rows(family):
    """What data parallelism hands to the model."""
    model = attached(tiny_model(family, sharp=True))
    layout = PackedLayout.from_segments([20, 5, 34], [1, 0, 1], "anchor")
    ids = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids, layout=layout).logits
        assert torch.equal(
            model(input_ids=ids, layout=ShardedLayouts.of([layout], SequenceGroups())).logits, expected
        )


@pytest.mark.parametrize("family", HYBRIDS)
def test_mixers_are_where_their_model_type_has_them(family):
    """Every module that transformers calls by a recurrent name is found, once, in the layers that configs call so."""
    model = tiny_model(family, sharp=True)
    found = mixers_of(model, ModelConfig.of(model.config))
    names = ("DeltaNet", "DeltaAttention", "ShortConv", "Mixer", "MambaLayer", "LightningAttention")
    assert {id(mixer) for mixer in found} == {
        id(module) for module in model.modules() if type(module).__name__.endswith(names)
    }


def test_a_mixer_that_is_handed_no_layout_is_refused_by_name():
    model = attached(tiny_model("lfm2", sharp=True))
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda hidden, layout, **kwargs: own(hidden, **kwargs)
    with pytest.raises(EngineError, match="Lfm2ShortConv receives no keyword arguments from its layer"):
        model(input_ids=torch.ones(1, 9, dtype=torch.long), layout=PackedLayout.from_lengths([8]))


def test_a_transformers_that_passes_no_layout_on_is_refused_by_name(monkeypatch, tmp_path):
    """Before the forward of a mixer notices, and before weights are read."""
    plain = tiny_model("lfm2", sharp=True)
    plain.config.save_pretrained(tmp_path)
    pretend_transformers(monkeypatch, "5.21.4")
    said = (
        r"transformers 5\.21\.4 does not pass the document .* layers of lfm2; use transformers 5\.22 or later"
    )
    with pytest.raises(EngineError, match=said):
        attach(plain)
    with pytest.raises(EngineError, match=said):
        load_model(tmp_path)
    pretend_transformers(monkeypatch, "5.22.0")
    refuse_older_transformers(ModelConfig.of(plain.config))


def test_a_mixer_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(MIXERS, "lfm2", Mixer("mixer", SHORT_CONVOLUTION))
    with pytest.raises(
        EngineError,
        match="layer 0 of Lfm2ForCausalLM has no module 'mixer'",
    ):
        attached(tiny_model("lfm2", sharp=True))


def test_a_recurrent_layer_of_an_unknown_model_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(MIXERS, "lfm2")
    with pytest.raises(
        EngineError,
        match=r"has layers of type conv \(first in layer 0\), through which packed documents would leak",
    ):
        attach(tiny_model("lfm2", sharp=True))


@pytest.mark.parametrize("family", sorted(set(HYBRIDS) - {"nemotron_h", "kimi_linear"}))
def test_the_exact_rotary_module_fits(family):
    plain = tiny_model(family, sharp=True)
    ours = attached(plain, exact_rope=True)
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        packed = ours(ids, layout=PackedLayout.from_lengths([30], "full", 0)).logits
    # Angles of up to 29 rad that are rounded to float32 and not, through a few layers of float32.
    assert float((packed - expected).abs().max()) <= 2**-12 * float(expected.abs().max())


def test_the_axes_of_images_stay_in_the_config_of_qwen3_5():
    config = ModelConfig.of(tiny_model("qwen3_5", sharp=True).config)
    axes = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    values = {**config.values, "rope_parameters": {**config.values["rope_parameters"], **axes}}
    method = methods_from_config(values)[None]
    assert method == config.full_attention_rope
    written = replace_methods(values, replace(method, rope_theta=5e6))["rope_parameters"]
    assert written["rope_theta"] == 5e6
    assert {key: written[key] for key in axes} == axes
    with pytest.raises(RopewalkError, match=r"the keys mrope_interleaved, mrope_section .* does not support"):
        methods_from_config({**values, "model_type": "llama"})


def test_positions_that_differ_by_axis_are_refused():
    rotary = RotaryEmbedding(Default(rotary_dim=8, rope_theta=1e4))
    positions = torch.arange(6)[None].expand(3, 1, 6)
    expected = rotary(torch.empty(1), positions[0])
    for same in (positions, positions.clone()):
        assert all(torch.equal(*pair) for pair in zip(rotary(torch.empty(1), same), expected, strict=True))
    with pytest.raises(RopewalkError, match="position_ids differ between axes"):
        rotary(torch.empty(1), positions + torch.arange(3)[:, None, None])


@pytest.mark.parametrize("mesh", [MeshShape(shard=2, ring=2), MeshShape(sequence=2)])
def test_a_transformers_whose_states_are_out_of_reach_is_refused_before_training(mesh, monkeypatch):
    config = ModelConfig.of(tiny_model("qwen3_next", sharp=True).config)
    pretend_transformers(monkeypatch, "5.24.0")
    refuse_on_mesh(mesh, config, True, [])
    pretend_transformers(monkeypatch, "5.23.1")
    with pytest.raises(
        EngineError, match=r"transformers 5\.23\.1 gives no access .* use transformers 5\.24 or later"
    ):
        refuse_on_mesh(mesh, config, True, [])
    refuse_on_mesh(MeshShape(replicate=2, shard=2), config, True, [])


def test_planning_is_about_the_attention_of_a_hybrid():
    config = ModelConfig.of(tiny_model("qwen3_next", sharp=True).config)
    assert [layer.rotates for layer in config.layers] == [False, True, False, True]
    assert config.context_layers(4096)
    assert config.training_refusals(4096) == []
    assert ModelConfig.of(tiny_model("falcon_h1", sharp=True).config).context_layers(4096)
    assert not any(
        layer.rotates for layer in ModelConfig.of(tiny_model("nemotron_h", sharp=True).config).layers
    )
    granite = tiny_model("granitemoehybrid", sharp=True).config
    granite.position_embedding_type = None
    assert ModelConfig.of(granite).training_refusals(4096) == [
        "has no layer with RoPE, so another RoPE would extend nothing; to train it as it is, set rope: {method: "
        "default} in every stage"
    ]
    assert ModelConfig.of(granite).training_refusals(4096, keeps_rope=True) == []


def test_model_types_without_rope_are_those_whose_source_has_no_rotary_module():
    models = Path(transformers.__file__).parent / "models"
    folders = {name: name.removesuffix("_text") for name in MIXERS}
    files = {name: models / folder / f"modeling_{folder}.py" for name, folder in folders.items()}
    without = {
        name
        for name, file in files.items()
        if file.exists() and "RotaryEmbedding(config" not in file.read_text()
    }
    assert without == set(WITHOUT_ROPE)
    if absent := sorted(name for name, file in files.items() if not file.exists()):
        missing(f"the source of {', '.join(absent)}")
