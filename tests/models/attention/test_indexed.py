"""Sparse attention with an indexer in packed rows: each query chooses among what it sees, as in its document alone."""

import copy

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.attention.chosen import Visibility
from ropewalk.errors import EngineError
from ropewalk.models.adapter import places_of
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.attention import indexed
from ropewalk.models.compute.pieces import fuse_pieces
from ropewalk.models.config.layers import INDEXERS, INDEXERS_SINCE
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import attach, checkpoint_activations
from ropewalk.parallel import MeshShape, SequenceGroups, ShardedLayouts
from ropewalk.rope import Default
from ropewalk.training.preflight import refuse_on_mesh
from tests.marks import slow_after
from tests.models.attention.test_hooks import documents_alone
from tests.models.every_family import tiny_model
from tests.training.family_cases import rows_with_anchor, two_steps, two_steps_on_ranks
from tests.versions import needs_transformers, pretend_transformers

LENGTHS = (23, 5, 17)
"""Documents longer than the 8 tokens that a query chooses, and one shorter."""
CHUNK = 12
"""Queries of a chunk, which begin and end within documents."""
ROUNDING = 256 * 2.0**-23
"""Of the largest value: norms, rotary angles and scores of indexers are float32 in any model."""
NOTICED = 1e-3
FAMILIES = slow_after(2, ["glm_moe_dsa", "hy_v4", "axk2", "deepseek_v32"])
"""The first two have layers that take the choice of the layer before, and the second has sinks."""


@pytest.fixture(autouse=True)
def _known() -> None:
    needs_transformers(INDEXERS_SINCE, "a model with indexers")


@pytest.fixture
def chunks(monkeypatch):
    """A row of the tests in four chunks of queries, in models with 32 heads of an indexer."""
    monkeypatch.setattr(indexed, "SCORE_BYTES", CHUNK * 32 * (sum(LENGTHS) + 1) * 4)


def attached(plain, **options):
    ours = copy.deepcopy(plain)
    attach(ours, engine="sdpa", exact_rope=False, **options)
    return ours


def layout_of(pattern):
    positions = "continuous" if pattern == "full" else "reset"
    return PackedLayout.from_lengths(LENGTHS, pattern, int(pattern != "intra_document"), positions)


def row_of(layout):
    return torch.randint(3, 90, (1, layout.total_length), generator=torch.Generator().manual_seed(1))


def off(plain, ours, layout):
    """How far logits and gradients of a packed row are from those of each document alone, in units of the largest."""
    ids = row_of(layout)
    logits = ours(input_ids=ids, layout=layout).logits[0]
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    expected, loss = logits.detach().clone(), torch.zeros((), dtype=torch.float64)
    trained = torch.zeros(layout.total_length, 1, dtype=torch.float64)
    for tokens, alone in documents_alone(plain, ids, layout):
        expected[tokens] = alone.detach()
        loss = loss + (alone * cotangent[tokens]).sum()
        trained[tokens] = 1
    (logits * cotangent * trained).sum().backward()
    loss.backward()
    size = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    gradients = 0.0
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert ("indexer" not in name) or mine.grad is None, name
        if theirs.grad is not None:
            gradients = max(gradients, float((mine.grad - theirs.grad).abs().max()) / size)
    return float((logits - expected).detach().abs().max() / expected.abs().max()), gradients


@pytest.mark.parametrize("pattern", ["anchor", "intra_document", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_each_document_alone(family, pattern, chunks):
    """Outputs and gradients in float64; no gradient reaches an indexer."""
    plain = tiny_model(family, torch.float64)
    assert max(off(plain, attached(plain), layout_of(pattern))) <= ROUNDING


FAULTS = ("no intersection", "mask behind the choice", "another document's choice")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_choice_would_be_noticed(fault, chunks, monkeypatch):
    plain, layout = tiny_model("deepseek_v32", torch.float64), layout_of("intra_document")
    ours = attached(plain)
    sound_seen, sound_call = Visibility.seen, indexed._InChunks.__call__
    if fault == "no intersection":

        def chosen(self, chosen_BTC, start, stop):
            picked = torch.zeros(1, stop - start, stop + 1, dtype=torch.bool)
            return picked.scatter_(-1, chosen_BTC[:, start:stop].long().clamp(max=stop), True)[..., :stop][
                :, None
            ]

        monkeypatch.setattr(Visibility, "chosen", chosen)
    elif fault == "mask behind the choice":
        # The indexer chooses among all earlier tokens of the row, and attention drops what a query does not see.
        def earlier(self, start, stop):
            return (torch.arange(stop) <= torch.arange(start, stop)[:, None])[None]

        def chosen(self, chosen_BTC, start, stop):
            picked = torch.zeros(1, stop - start, stop + 1, dtype=torch.bool)
            places = chosen_BTC[:, start:stop].long().clamp(max=stop)
            own = torch.arange(start, stop)[None, :, None]
            picked = picked.scatter_(-1, torch.cat([places, own], -1), True)[..., :stop]
            return (sound_seen(self, start, stop) & picked)[:, None]

        monkeypatch.setattr(Visibility, "seen", earlier)
        monkeypatch.setattr(Visibility, "chosen", chosen)
    else:

        def shifted(self, *args, **kwargs):
            found = sound_call(self, *args, **kwargs)
            return torch.cat([found[:, -1:], found[:, :-1]], 1) if found.shape[-1] else found

        monkeypatch.setattr(indexed._InChunks, "__call__", shifted)
    # A query may be left with no token at all, which gives NaN.
    assert not max(off(plain, ours, layout)) <= NOTICED


def test_the_choice_does_not_depend_on_the_chunks(monkeypatch):
    plain = tiny_model("hy_v4", torch.float64)
    layout = layout_of("anchor")
    found = []
    for queries in (1, 7, 1000):
        monkeypatch.setattr(indexed, "SCORE_BYTES", queries * 32 * layout.total_length * 4)
        with torch.no_grad():
            found.append(attached(plain)(input_ids=row_of(layout), layout=layout).logits)
    for each in found[1:]:
        assert float((each - found[0]).abs().max()) <= ROUNDING * float(found[0].abs().max())


def test_rows_of_a_batch_have_their_own_documents(chunks):
    plain = tiny_model("glm_moe_dsa", torch.float64)
    ours = attached(plain)
    layouts = [layout_of("intra_document"), PackedLayout.from_lengths((30, 15), "intra_document", 0, "reset")]
    ids = torch.cat([row_of(layouts[0]), row_of(layouts[1]).flip(1)])
    with torch.no_grad():
        both = ours(input_ids=ids, layout=layouts).logits
        for row, layout in enumerate(layouts):
            for tokens, alone in documents_alone(plain, ids[row : row + 1], layout):
                assert float((both[row, tokens] - alone).abs().max()) <= ROUNDING * float(alone.abs().max())


def test_queries_that_see_no_more_than_they_may_choose_need_no_scores(monkeypatch):
    plain = tiny_model("hy_v4", torch.float64)
    layout = PackedLayout.from_lengths((7, 8, 3), "intra_document", 0, "reset")
    ours = attached(plain)
    monkeypatch.setattr(indexed, "visibility", None)
    assert max(off(plain, ours, layout)) <= ROUNDING


def test_checkpointed_layers_choose_the_same_again(chunks):
    plain = tiny_model("glm_moe_dsa", torch.float64)
    ours, layout = attached(plain).train(), layout_of("anchor")
    checkpoint_activations(ours)
    assert max(off(plain, ours, layout)) <= ROUNDING


def test_pieces_leave_the_indexer_its_chunks(chunks):
    plain = tiny_model("deepseek_v32", torch.float64)
    ours = attached(plain).train()
    fuse_pieces(ours)
    assert max(off(plain, ours, layout_of("anchor"))) <= ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_without_a_layout_are_those_of_plain_transformers(family):
    """Also with a cache: evaluation and generation choose tokens as transformers does."""
    plain = tiny_model(family, torch.float32)
    ours = attached(plain)
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = (model(ids, use_cache=False).logits for model in (plain, ours))
        dense = copy.deepcopy(plain)
        for module in dense.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 1000
        every = dense(ids, use_cache=False).logits
    assert float((found - expected).abs().max()) <= ROUNDING * float(expected.abs().max())
    assert float((every - expected).abs().max()) > NOTICED * float(expected.abs().max())
    written = [
        model.generate(ids[:, :20], max_new_tokens=8, min_new_tokens=8, do_sample=False)
        for model in (plain, ours)
    ]
    assert torch.equal(*written)


def test_ranks_that_share_a_row_are_refused():
    config = ModelConfig.of(tiny_model("axk2", torch.float32).config)
    for shape in (MeshShape(ring=2), MeshShape(sequence=2)):
        with pytest.raises(
            EngineError, match=r"indexers of axk2 choose among all earlier tokens .* set parallel.ring"
        ):
            refuse_on_mesh(shape, config, True, [Default(8, 1e4)])
    refuse_on_mesh(MeshShape(shard=2), config, True, [Default(8, 1e4)])
    ours = attached(tiny_model("axk2", torch.float32))
    sharded = ShardedLayouts.of([layout_of("anchor")], SequenceGroups(ring=2))
    part = sharded.take([row_of(layout_of("anchor"))[0]], 0)
    with pytest.raises(EngineError, match="a rank that shares the row has only a part of them"):
        ours(input_ids=part, layout=sharded)


def test_an_older_transformers_is_told_which_one_it_takes(monkeypatch):
    config = ModelConfig.of(tiny_model("deepseek_v32", torch.float32).config)
    assert config.indexed_layers == list(range(4))
    pretend_transformers(monkeypatch, "5.23")
    (refused,) = config.packing_refusals()
    assert f"the indexers of {', '.join(INDEXERS)} (from transformers 5.24 on)" in refused


def test_an_adapter_has_no_place_in_an_indexer():
    model = attached(tiny_model("glm_moe_dsa", torch.float32))
    found, _ = places_of(AdapterSettings(rank=2, targets=["all-linear"]), model)
    assert found
    assert not any("indexer" in name for name in found)
    with pytest.raises(
        Exception, match=r"adapter.targets.0 is 'wq_b', .* in an indexer, which no gradient reaches"
    ):
        places_of(AdapterSettings(rank=2, targets=["wq_b"]), model)


@pytest.mark.slow
def test_steps_of_two_ranks_are_those_of_one_process(two_ranks, tmp_path):
    """Each rank has rows of its own, and parameters are sharded; the indexers stay as they are."""
    torch.manual_seed(0)
    before = tiny_model("glm_moe_dsa", torch.float32)
    before.save_pretrained(tmp_path)
    steps, weights = two_steps(tmp_path, rows_with_anchor())
    (found, gathered), _ = two_ranks.run(two_steps_on_ranks, {"shard": 2}, tmp_path, rows_with_anchor())
    for (loss, norm, _), (loss_alone, norm_alone, _) in zip(found, steps, strict=True):
        assert (loss, norm) == pytest.approx((loss_alone, norm_alone), rel=2**-36)
    own = dict(before.named_parameters())
    for name, value in weights.items():
        assert float((gathered[name] - value).abs().max()) <= 2**-36, name
        if "indexer" in name:
            assert torch.equal(value.float(), own[name]), name
