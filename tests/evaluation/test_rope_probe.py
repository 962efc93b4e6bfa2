"""The probe against freshly loaded models with plain transformers' rotary module and cross entropy."""

import copy
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ropewalk.attention.layout import IGNORED, PackedLayout, Row, next_token_labels
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import candidate_methods, evaluation_rows
from ropewalk.evaluation.rope_probe import ProbedSetting, probe_model
from ropewalk.evaluation.statistics import ratio_interval
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.load import ModelSetup, attach, load_model
from ropewalk.models.rope.rotary import rope_of, rotary_module
from ropewalk.rope import (
    Default,
    DynamicNtk,
    Linear,
    LongRope,
    RopeMethod,
    RotaryEmbedding,
    methods_from_config,
)
from tests.evaluation.evaluation_cases import perplexity_by_position, tiny_llama

TRAINED, TARGET = 64, 160
NAMES = ("current", "critical-dimension", "ntk", "linear", "yarn", "llama3", "theta=5e6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(folder)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rng = np.random.default_rng(5)
    documents = [rng.integers(3, 97, size=n) for n in (300, 31, 70, 140, 64, 200)]
    return evaluation_rows(documents, TARGET, 1, None, 5).rows


@pytest.fixture(scope="module")
def methods(model: Any) -> dict[str, RopeMethod]:
    current = methods_from_config(model.config.to_dict())[None]
    methods, refused = candidate_methods(NAMES, current, TRAINED, TARGET)
    assert refused == []
    return methods


@pytest.fixture(scope="module")
def found(model: Any, methods: dict[str, RopeMethod], rows: list[Row]) -> dict[str, ProbedSetting]:
    return {result.name: result for result in probe_model(model, methods, rows, TRAINED)}


def plain_losses(folder: Path, method: RopeMethod, rows: list[Row]) -> list[np.ndarray]:
    """Loss of every target, NaN where there is none: full logits, no layout, transformers' rotary module."""
    model = load_model(folder, ModelSetup(rope=method, exact_rope=False, max_position_embeddings=TARGET))
    losses = []
    for row in rows:
        with torch.no_grad():
            logits = model(row.input_ids[None]).logits[0]
        loss = F.cross_entropy(logits, row.labels, reduction="none", ignore_index=IGNORED)
        losses.append(torch.where(row.labels == IGNORED, math.nan, loss).double().numpy())
    return losses


def mean_of(losses: list[np.ndarray], part: slice = slice(None)) -> float:
    return float(np.nanmean(np.concatenate([each[part] for each in losses])))


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_a_model_loaded_with_that_method(
    folder: Path, methods: dict[str, RopeMethod], rows: list[Row], found: dict[str, ProbedSetting], name: str
) -> None:
    result, plain = found[name], plain_losses(folder, methods[name], rows)
    # transformers' angles of up to 159 rad are rounded to 1e-5 rad; losses of 5 nats move by less.
    assert result.loss == pytest.approx(mean_of(plain), rel=1e-5)
    assert result.within_loss == pytest.approx(mean_of(plain, slice(None, TRAINED)), rel=1e-5)
    assert result.beyond_loss == pytest.approx(mean_of(plain, slice(TRAINED, None)), rel=1e-5)
    assert result.method == methods[name]
    assert result.status == "ok"
    assert result.ci95[0] < result.loss < result.ci95[1]


def test_settings_differ_and_come_best_first(
    model: Any, methods: dict[str, RopeMethod], rows: list[Row], found: dict[str, ProbedSetting]
) -> None:
    """Equal losses would mean that the rotary module was never exchanged."""
    order = [result.loss for result in found.values()]
    assert order == sorted(order)
    assert len({round(loss, 4) for loss in order}) == len(NAMES)


def test_current_is_the_unchanged_model(model: Any, rows: list[Row], found: dict[str, ProbedSetting]) -> None:
    measured = perplexity_by_position(model, OutputHead.of(model), rows, [0, TRAINED, TARGET])
    result = found["current"]
    assert result.loss == pytest.approx(math.log(measured.overall.perplexity), rel=1e-12)
    assert result.beyond_loss == pytest.approx(math.log(measured.bins[1].perplexity), rel=1e-12)
    assert result.ci95 == pytest.approx(tuple(map(math.log, measured.overall.ci95)), rel=1e-12)


def test_differences_are_paired_with_the_best(
    folder: Path, methods: dict[str, RopeMethod], rows: list[Row], found: dict[str, ProbedSetting]
) -> None:
    best, *others = found.values()
    assert best.difference == 0
    assert best.difference_ci95 == (0, 0)
    for other in others:
        assert other.difference == pytest.approx(other.loss - best.loss, abs=1e-12)
        assert other.difference_ci95[0] <= other.difference <= other.difference_ci95[1]
    # What the rows have in common drops out of the pairs: less spread than between two independent means.
    near = others[0]
    assert np.ptp(near.difference_ci95) < np.hypot(np.ptp(near.ci95), np.ptp(best.ci95))
    ours, theirs = (plain_losses(folder, methods[r.name], rows) for r in (near, best))
    pairs = [mean_of([a]) - mean_of([b]) for a, b in zip(ours, theirs, strict=True)]
    counts = [np.isfinite(each).sum() for each in ours]
    assert near.difference == pytest.approx(np.average(pairs, weights=counts), abs=1e-5)
    totals = [pair * count for pair, count in zip(pairs, counts, strict=True)]
    assert near.difference_ci95 == pytest.approx(ratio_interval(totals, counts), abs=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_before_to_the_last_bit(
    folder: Path, methods: dict[str, RopeMethod], rows: list[Row], training: bool
) -> None:
    model = load_model(folder).train(training)
    ids = rows[0].input_ids[None]
    config, rotary = copy.deepcopy(model.config.to_dict()), rotary_module(model)[2]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        before = model(ids).logits
    probe_model(model, methods, rows[:1], TRAINED)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert rotary_module(model)[2] is rotary
    assert {module.training for module in model.modules()} == {training}
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_rotary_module_comes_back_after_an_error(model: Any, rows: list[Row]) -> None:
    rotary = rotary_module(model)[2]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe_model(model, {"a": Default(8, 3e4)}, rows, TRAINED, progress=interrupt)
    assert rotary_module(model)[2] is rotary


def test_a_length_dependent_method_takes_the_rows_length(folder: Path, model: Any, rows: list[Row]) -> None:
    dynamic = DynamicNtk(8, 1e4, 4.0, TRAINED)
    base = 1e4 * (4.0 * TARGET / TRAINED - 3.0) ** (8 / 6)
    first, second = probe_model(model, {"dynamic": dynamic, "by hand": Default(8, base)}, rows, TRAINED)
    assert first.loss == pytest.approx(second.loss, abs=1e-9)


def test_rows_on_both_sides_of_an_original_length_take_their_own_factors(model: Any, rows: list[Row]) -> None:
    """The short factors for the rows within it, as for short rows of training, and the long ones beyond."""
    factors = (1.0, 2.0, 3.0, 4.0)
    plain = {
        name: LongRope(8, 1e4, each, each, 1.2, TRAINED)
        for name, each in (("long", factors), ("short", (1.0,) * 4))
    }
    both = LongRope(8, 1e4, (1.0,) * 4, factors, 1.2, TRAINED)
    layout = PackedLayout.from_lengths([TRAINED], "full", 0)
    short = [Row(row.input_ids[:TRAINED], row.labels[:TRAINED], layout) for row in rows]
    for name, each in (("long", rows), ("short", short)):
        found = {one.name: one.loss for one in probe_model(model, {"both": both, **plain}, each, TRAINED)}
        assert found["both"] == found[name] != found["short" if name == "long" else "long"]


def test_nothing_lies_beyond_a_target_that_is_not_longer(model: Any, rows: list[Row]) -> None:
    (result,) = probe_model(model, {"current": Default(8, 1e4)}, rows, TARGET)
    assert result.beyond_loss is result.beyond_ci95 is None
    assert result.within_loss == result.loss


def test_one_row_has_no_interval_and_a_probe_repeats(model: Any, rows: list[Row]) -> None:
    two = {"a": Default(8, 1e4), "b": Default(8, 1e6)}
    for result in probe_model(model, two, rows[:1], TRAINED):
        assert all(map(math.isnan, (*result.ci95, *result.difference_ci95)))
        assert math.isfinite(result.difference)
        assert json.loads(json.dumps(result.to_json(), allow_nan=False))["ci95"] == [None, None]
    assert probe_model(model, two, rows, TRAINED) == probe_model(model, two, rows, TRAINED)


def test_a_loss_that_is_no_number_comes_last_and_says_so(
    model: Any, rows: list[Row], monkeypatch: Any
) -> None:
    forward = RotaryEmbedding.forward

    def broken(self: RotaryEmbedding, *args: Any, **kwargs: Any) -> Any:
        cos, sin = forward(self, *args, **kwargs)
        return (cos * math.nan, sin) if self.methods[None].rope_theta == 7e4 else (cos, sin)

    monkeypatch.setattr(RotaryEmbedding, "forward", broken)
    good, bad = probe_model(model, {"broken": Default(8, 7e4), "good": Default(8, 1e4)}, rows[:2], TRAINED)
    assert (good.name, bad.name) == ("good", "broken")
    assert bad.to_json()["loss"] is bad.to_json()["difference"] is None
    assert bad.reason == "the loss is not a finite number"
    assert good.difference == 0


def test_progress_counts_forward_passes(model: Any, rows: list[Row]) -> None:
    calls: list[tuple[int, int]] = []
    two = {"a": Default(8, 1e4), "b": Default(8, 1e6)}
    probe_model(model, two, rows[:2], TRAINED, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_what_has_no_meaning_is_not_run_and_says_why() -> None:
    methods, refused = candidate_methods(
        ("current", "ntk", "linear", "schedule:lwm"), Linear(8, 1e4, 2.0), 64, 2**21
    )
    assert list(methods) == ["current", "linear"]
    assert [(r.name, r.status, r.method) for r in refused] == [
        ("ntk", "not run", None),
        ("schedule:lwm", "not run", None),
    ]
    assert "rules for rope_theta need unscaled RoPE" in (refused[0].reason or "")
    said = refused[0].to_json()
    assert {said[key] for key in ("loss", "difference", "beyond_loss", "rope_theta")} == {None}
    with pytest.raises(RopewalkError, match=r"no RoPE setting is left to probe \(ntk: .*unscaled RoPE"):
        candidate_methods(("ntk",), Linear(8, 1e4, 2.0), 64, 128)
    with pytest.raises(RopewalkError, match="unknown rule 'ntkk'; did you mean ntk"):
        candidate_methods(("current", "ntkk"), Default(8, 1e4), 64, 128)


def test_refuses_what_it_cannot_exchange_or_score(model: Any, rows: list[Row]) -> None:
    one: dict[str, RopeMethod] = {"current": Default(8, 1e4)}
    stock = tiny_llama()
    attach(stock, exact_rope=False)
    with pytest.raises(RopewalkError, match="load the model with exact_rope=True"):
        probe_model(stock, one, rows, TRAINED)
    with pytest.raises(RopewalkError, match="has rotary_dim 16, but LlamaForCausalLM rotates 8 dimensions"):
        probe_model(model, {"wide": Default(16, 1e4)}, rows, TRAINED)
    with pytest.raises(RopewalkError, match="at least one RoPE setting"):
        probe_model(model, {}, rows, TRAINED)
    with pytest.raises(RopewalkError, match="at least one row"):
        probe_model(model, one, [], TRAINED)
    with pytest.raises(RopewalkError, match="1 token or more, got 0"):
        probe_model(model, one, rows, 0)
    layout = PackedLayout.from_lengths([7])
    ids = torch.arange(8)
    with pytest.raises(RopewalkError, match="rows with the pattern 'full', got 'anchor'"):
        probe_model(model, one, [Row(ids, next_token_labels(ids, layout), layout)], TRAINED)


def test_of_a_method_for_each_layer_type_that_of_full_attention_is_exchanged() -> None:
    model = tiny_llama()
    near, far = Default(8, 1e4), Default(8, 1e6)
    model.model.rotary_emb = RotaryEmbedding({"full_attention": far, "sliding_attention": near})
    with rope_of(model, Default(8, 5e6)):
        assert rotary_module(model)[2].methods == {
            "full_attention": Default(8, 5e6),
            "sliding_attention": near,
        }
    assert rotary_module(model)[2].methods == {"full_attention": far, "sliding_attention": near}


def test_the_style_of_the_model_is_kept(model: Any) -> None:
    parent, attribute, own = rotary_module(model)
    setattr(parent, attribute, RotaryEmbedding(Default(8, 1e4), style="interleaved"))
    try:
        with rope_of(model, Default(8, 2e4)):
            assert rotary_module(model)[2].style == "interleaved"
            assert rotary_module(model)[2].methods == {None: Default(8, 2e4)}
    finally:
        setattr(parent, attribute, own)


def test_trained_length_counts_a_yarn_factor_in(model: Any) -> None:
    assert ModelConfig.of(model.config).trained_length == 64
    scaled = tiny_llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    )
    assert ModelConfig.of(scaled.config).trained_length == 256


@pytest.mark.slow
def test_real_checkpoint(stories260k: Path, stories: Path) -> None:
    """512 to 2048 tokens, on eight rows of packed stories.

    NTK's base (63,000) starts below the unchanged one beyond the trained length. The critical-dimension base
    (182,000) does not: this model of 8 dimensions a head is disturbed by it more than by going on unchanged.
    """
    from ropewalk.data import SourceSpec, load_tokenizer, read_documents
    from ropewalk.data.tokens.tokenise import tokenise

    tokenizer = load_tokenizer(str(stories260k))
    stream = tokenise(read_documents([SourceSpec(path=str(stories))]), tokenizer)
    documents = [document.input_ids for document in islice(stream, 100)]
    rows = evaluation_rows(documents, 2048, tokenizer.bos_token_id, None, 8).rows
    model = load_model(stories260k)
    methods, _ = candidate_methods(("current", "critical-dimension", "ntk"), Default(8, 1e4), 512, 2048)
    found = {result.name: result for result in probe_model(model, methods, rows, 512)}
    assert list(found) == ["ntk", "current", "critical-dimension"]
    # One row is enough to tell that a base of 2 is the worst of all.
    absurd, _ = candidate_methods(("theta=2", "critical-dimension"), Default(8, 1e4), 512, 2048)
    assert [result.name for result in probe_model(model, absurd, rows[:1], 512)] == [
        "critical-dimension",
        "theta=2",
    ]
    ntk, current, critical = (found[name] for name in ("ntk", "current", "critical-dimension"))
    assert ntk.beyond_ci95[1] < current.beyond_loss < critical.beyond_ci95[0]
    assert current.within_loss < ntk.within_loss
    assert critical.difference_ci95[0] > 0.2
    fresh = load_model(stories260k, ModelSetup(rope=methods["ntk"], max_position_embeddings=2048))
    with torch.no_grad():
        logits = fresh(rows[0].input_ids[None]).logits[0]
    (one,) = probe_model(model, {"ntk": methods["ntk"]}, rows[:1], 512)
    expected = F.cross_entropy(logits, rows[0].labels, ignore_index=IGNORED)
    assert one.loss == pytest.approx(float(expected), rel=1e-5)
