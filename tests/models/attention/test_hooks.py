"""What a layer asks of its attention reaches ``attend``: windows, chunks, sinks, and what is refused."""

import copy
from itertools import pairwise

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.attention.hooks import LayoutCall, attention_options_of
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach
from tests.marks import slow_after
from tests.models.families import ATTENTIONS, LOCAL, WINDOW, tiny_model

LENGTHS = (23, 5, 17)
"""Documents longer than the window, and one shorter."""


def documents_alone(model, ids, layout):
    """Logits of each run by itself: plain transformers, eager attention, its own mask; and the tokens of each run."""
    if layout.pattern == "full":
        runs = [(torch.arange(layout.total_length), 0)]
    else:
        anchor = torch.arange(layout.anchor_length)
        starts = layout.cu_seqlens.tolist()
        runs = [
            (torch.cat([anchor, torch.arange(start, end)]), layout.anchor_length)
            for start, end in pairwise(starts)
        ]
    for tokens, anchor_length in runs:
        logits = model(
            input_ids=ids[:, tokens],
            position_ids=layout.position_ids[tokens][None],
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            use_cache=False,
        ).logits[0]
        yield tokens[anchor_length:], logits[anchor_length:]


@pytest.mark.parametrize("pattern", slow_after(1, ["anchor", "full", "intra_document"]))
@pytest.mark.parametrize("family", ATTENTIONS)
def test_a_packed_row_equals_each_document_alone(family, pattern):
    """Outputs and gradients in float64, of layers with windows and without, against the model's own attention."""
    plain = tiny_model(family, torch.float64, sharp=True)
    ours = copy.deepcopy(plain)
    attach(ours, engine="sdpa", exact_rope=False)
    positions = "continuous" if pattern == "full" else "reset"
    layout = PackedLayout.from_lengths(LENGTHS, pattern, int(pattern != "intra_document"), positions)
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (1, layout.total_length))
    logits = ours(input_ids=ids, layout=layout).logits[0]
    cotangent = torch.randn_like(logits)
    expected, loss = logits.detach().clone(), torch.zeros((), dtype=torch.float64)
    trained = torch.zeros(layout.total_length, 1, dtype=torch.float64)
    for tokens, alone in documents_alone(plain, ids, layout):
        expected[tokens] = alone.detach()
        loss = loss + (alone * cotangent[tokens]).sum()
        trained[tokens] = 1
    # Norms and rotary angles of transformers are float32 in any model: a last bit of theirs is amplified by the layers
    # that follow. A window of one token more is off by a thousandth (below).
    rounding = 256 * 2.0**-23
    assert float((logits - expected).detach().abs().max()) <= rounding * float(expected.abs().max())
    (logits * cotangent * trained).sum().backward()
    loss.backward()
    size = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            assert float((mine.grad - theirs.grad).abs().max()) <= rounding * size, name


def test_a_window_matters_in_these_models():
    """The same rows with a window of one token more give other logits: the test above would notice."""
    model = tiny_model("mistral", torch.float64, sharp=True)
    attach(model, engine="sdpa")
    layout = PackedLayout.from_lengths(LENGTHS, "anchor")
    ids = torch.randint(3, 90, (1, layout.total_length))
    with torch.no_grad():
        sound = model(input_ids=ids, layout=layout).logits
        model._ropewalk_hooks.localities = (Locality(WINDOW + 1),) * 3
        model.config.sliding_window = WINDOW + 1
        for layer in model.model.layers:
            layer.self_attn.sliding_window = WINDOW + 1
        other = model(input_ids=ids, layout=layout).logits
    assert float((sound - other).abs().max()) > 1e-3 * float(sound.abs().max())


class Layer(torch.nn.Module):
    layer_idx = 1


def call_with(*localities):
    layout = PackedLayout.from_lengths([4])
    return LayoutCall((layout,), "sdpa", localities, layout.position_ids[None])


def test_a_layer_asks_for_what_its_config_and_its_module_say():
    sinks = torch.zeros(2)
    asked = attention_options_of(
        Layer(),
        call_with(EVERYTHING, Locality(7)),
        {"scaling": 0.5, "softcap": 9.0, "s_aux": sinks, "sliding_window": 7},
    )
    assert (asked.scale, asked.softcap, asked.window, asked.chunk, asked.sinks) == (0.5, 9.0, 7, None, sinks)
    assert attention_options_of(Layer(), call_with(EVERYTHING, Locality(chunk=5)), {}).chunk == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sliding_window": 8},
            "uses a sliding window of 8 tokens, but the config states a sliding window of 7 tokens",
        ),
        ({}, "uses no sliding window, but the config states a sliding window of 7 tokens"),
        ({"dropout": 0.1}, "uses attention dropout 0.1"),
        ({"is_causal": False}, "attends in both directions"),
        (
            {"position_bias": torch.zeros(1)},
            "calls its attention function with position_bias, which no attention engine supports",
        ),
    ],
)
def test_what_no_engine_does_is_refused_by_name(options, message):
    with pytest.raises(EngineError, match=message):
        attention_options_of(Layer(), call_with(EVERYTHING, Locality(7)), options)


def test_a_layer_that_does_not_say_its_number_is_refused_where_layers_differ():
    nameless = torch.nn.Module()
    assert (
        attention_options_of(nameless, call_with(Locality(7), Locality(7)), {"sliding_window": 7}).window == 7
    )
    with pytest.raises(EngineError, match=r"an attention module has layer_idx .*, but needs a value from 0"):
        attention_options_of(nameless, call_with(Locality(7), EVERYTHING), {})


@pytest.mark.parametrize("family", LOCAL)
def test_localities_are_those_of_the_config(family):
    model = tiny_model(family, sharp=True)
    reaches = {local.reach for local in ModelConfig.of(model.config).localities}
    assert WINDOW in reaches
    assert reaches <= {WINDOW, None}


@pytest.mark.parametrize("family", sorted(set(ATTENTIONS) - {"granite_swa"}))
def test_the_exact_rotary_module_fits_every_layout_of_angles(family):
    """cos and sin in halves, interleaved, once a pair, or as complex numbers: the logits stay those of the model."""
    plain = tiny_model(family, sharp=True)
    ours = copy.deepcopy(plain)
    attach(ours, engine="sdpa")
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        packed = ours(ids, layout=PackedLayout.from_lengths([30], "full", 0)).logits
    # Angles of up to 29 rad that are rounded to float32 and not, through a few layers of float32.
    assert float((packed - expected).abs().max()) <= 2**-12 * float(expected.abs().max())


def test_a_model_of_two_rotary_modules_keeps_its_own():
    with pytest.raises(
        RopewalkError,
        match="has 2 rotary modules, but ropewalk can replace only one; keep transformers' own RoPE",
    ):
        attach(tiny_model("granite_swa", sharp=True), engine="sdpa")


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("length", [WINDOW - 2, 20])
def test_the_last_logits_alone_are_those_of_all(length, keep):
    """Gemma 4 drops all but the last queries before layers that share keys, and short rows have no mask."""
    plain = tiny_model("gemma4 with shared keys", torch.float64, sharp=True)
    ours = copy.deepcopy(plain)
    attach(ours, engine="sdpa", exact_rope=False)
    ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(1))
    layout = PackedLayout.from_lengths([length], "full", 0)
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits[:, -keep:]
        stock = ours(ids, logits_to_keep=keep, use_cache=False).logits
        packed = ours(ids, logits_to_keep=keep, layout=layout).logits
    for found in (stock, packed):
        assert float((found - expected).abs().max()) <= 256 * 2.0**-23 * float(expected.abs().max())
