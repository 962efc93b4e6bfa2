"""Stages with short rows: what they train is what plain transformers makes of the export, on one process and on two."""

import json
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import ropewalk.training.run_state as run_state
from ropewalk import PackedLayout
from ropewalk.attention.layout import Row
from ropewalk.compatibility import readings
from ropewalk.data import TrainingRows
from ropewalk.reporting.run.model_card import write_model_card
from ropewalk.reporting.run.training import write_run_report
from ropewalk.training.preflight import announcement, resolve
from tests.models.attention.passed_cases import in_float64
from tests.models.attention.two_ropes_cases import the_longest_decides
from tests.training.resume_cases import Notes, metrics_of, recipe_of, refused, weights_of, with_stage
from tests.training.run_cases import cut_off_after, extend, extended
from tests.training.short_rows_cases import (
    CONTEXT,
    FACTORS,
    LONGROPE,
    PAIRS,
    T,
    in_plain_transformers,
    in_training,
    long_everywhere,
    one_of_each,
    plain_model,
    rows_of,
    short_everywhere,
    training_model,
    with_short_rows,
    without_factor,
)
from tests.training.tiny import WORDS

ROUNDING = 1e-12
"""Of the largest logit: sums of some dozen terms in another order, in float64."""
WRONG = 1e-6
ROPES = {"theta": "theta", "yarn": "yarn", "ntk": "ntk", "longrope": LONGROPE}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_checkpoint, tiny_documents):
    """A finished run with yarn, whose attention factor is not 1, and what it said."""
    values = with_short_rows(
        {
            "model": str(tiny_checkpoint),
            "output": str(tmp_path_factory.mktemp("short") / "run"),
            "data": {"sources": [str(tiny_documents)], "validation_documents": 20},
            "stages": [{"steps": 6, "learning_rate": 1e-2}],
            "checkpoints": {"every": 2, "keep": 9},
            "evaluation": {"suites": ["perplexity"], "rows": 2},
        }
    )
    notes = Notes()
    return values, extend(recipe_of(values), reporter=notes), notes.told


def difference(values, change=None, broken=None):
    """Largest difference of logits, of a batch with a row of each kind, and of sequences at the switch."""
    recipe, folder = recipe_of(values), Path(values["output"]) / "model"
    batch = one_of_each(values["output"])
    assert [row.layout.rope_length > T for row in batch] == [True, False]
    ids, batches = batch[0].input_ids, [batch]
    for length in (T, T + 1):
        batches.append([Row(ids[:length], ids[:length], PackedLayout.from_lengths([length], "full", 0))])
    method = resolve(recipe).methods[0]
    ours = training_model(recipe, folder, method if change is None else change(method))
    plain = plain_model(folder)
    # The rotary modules of transformers 5.23 know float32 by this name too.
    with in_float64(), patch.object(torch, "float", torch.float64), ExitStack() as stack:
        if broken is not None:
            broken(stack)
        found = [(in_training(ours, rows), in_plain_transformers(plain, rows)) for rows in batches]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in found)


@pytest.mark.parametrize("rope", [name for name in ROPES if name != "yarn"])
def test_every_method_trains_what_plain_transformers_computes(recipe_values, rope):
    values = with_short_rows(recipe_values, ROPES[rope], steps=2)
    extend(recipe_of(values))
    assert difference(values) <= ROUNDING


def test_the_exported_model_is_the_trained_one_on_both_sides_of_the_original_length(trained):
    values, _, _ = trained
    assert difference(values) <= ROUNDING


@pytest.mark.parametrize("change", [without_factor, long_everywhere, short_everywhere])
def test_another_rope_in_training_would_be_another_model(trained, change):
    assert difference(trained[0], change) > WRONG


def test_rows_that_the_longest_decides_would_be_another_model(trained):
    assert difference(trained[0], broken=the_longest_decides) > WRONG


def test_the_config_switches_at_the_original_length_and_says_what_programs_make_of_it(trained):
    values, summary, _ = trained
    config = json.loads((Path(values["output"]) / "model" / "config.json").read_text())
    entry = config["rope_parameters"]
    assert (entry["rope_type"], entry["original_max_position_embeddings"]) == ("longrope", T)
    assert (entry["short_factor"], config["max_position_embeddings"]) == ([1.0] * PAIRS, CONTEXT)
    assert entry["attention_factor"] == summary["stages"][0]["attention_factor"] != 1
    verdicts = {each.key: each for each in readings(summary["model"])}
    assert verdicts["transformers"].verdict == "same"
    assert "cached keys keep the earlier ones" in verdicts["transformers"].detail
    for server in ("vllm", "sglang"):
        assert verdicts[server].verdict == "long inputs only"
        assert verdicts[server].short == T


def test_the_summary_and_the_report_name_both_kinds(trained):
    values, summary, told = trained
    kinds = summary["stages"][0]["kinds"]
    rows = rows_of(values["output"])
    taken = [row for step in range(6) for row in rows.of_step(step, 4, 0)]
    for kind, folder in (("short", rows.short), ("long", rows.folder)):
        own = [rows.read(row) for row in taken if row.folder is folder]
        found = kinds[kind]
        assert (found["rows"], found["rows_share"]) == (len(own), 0.5)
        assert found["trained_tokens"] == sum(int((row.labels >= 0).sum()) for row in own)
        assert found["packed_rows"] == len(folder)
    assert kinds["short"]["trained_tokens_share"] + kinds["long"]["trained_tokens_share"] == pytest.approx(1)
    trained_tokens = sum(
        json.loads(line)["trained_tokens"]
        for line in (Path(values["output"]) / "metrics.jsonl").read_text().splitlines()
    )
    assert sum(each["trained_tokens"] for each in kinds.values()) == trained_tokens
    page = write_run_report(Path(values["output"]))[0].read_text()
    assert "50.0% of the rows and" in page
    assert "short rows (documents of at most 32 tokens)" in page
    assert "128 tokens, yarn as longrope" in page
    card = write_model_card(Path(values["output"])).read_text()
    assert "50.0% of the rows have only documents of at most 32 tokens, with the RoPE from before" in card
    assert "yarn, base 10,000, as the long factors of a longrope" in card
    said = f"stage 1: {len(rows.short)} short training rows of 128 tokens of documents of at most 32 tokens, read"
    assert any(line.startswith(said) for line in told)
    lines = announcement(resolve(recipe_of(values)))
    assert any("0.5 of the rows are short: documents of at most 32 tokens" in line for line in lines)


def test_killed_and_resumed_the_losses_are_the_same_to_the_last_bit(trained, tmp_path):
    values, _, _ = trained
    again = {**values, "output": str(tmp_path / "run")}
    with cut_off_after(3):
        extend(recipe_of(again))
    extend(recipe_of(again), resume=True)
    assert metrics_of(again["output"]) == metrics_of(values["output"])
    assert weights_of(again["output"]) == weights_of(values["output"])


def test_a_run_that_lost_its_short_rows_when_it_was_resumed_would_differ(trained, tmp_path, monkeypatch):
    values, _, _ = trained
    again = {**values, "output": str(tmp_path / "run")}
    with cut_off_after(3):
        extend(recipe_of(again))
    monkeypatch.setattr(run_state.AtStage, "training_rows", lambda self, number: TrainingRows(self.rows))
    extend(recipe_of(again), resume=True)
    assert metrics_of(again["output"])[:2] == metrics_of(values["output"])[:2]
    assert metrics_of(again["output"])[2:] != metrics_of(values["output"])[2:]


def test_short_rows_whose_folder_is_gone_are_packed_again(trained, tmp_path):
    import shutil

    values, _, _ = trained
    again = {**values, "output": str(tmp_path / "run")}
    with cut_off_after(3):
        extend(recipe_of(again))
    shutil.rmtree(rows_of(again["output"]).short.folder)
    extend(recipe_of(again), resume=True)
    assert metrics_of(again["output"]) == metrics_of(values["output"])


@pytest.mark.parametrize(
    "mesh", [{"sequence": 2}, {"ring": 2}, {"shard": 2}], ids=lambda mesh: next(iter(mesh))
)
def test_two_ranks_train_as_one(two_ranks, trained, tmp_path, mesh):
    values, _, _ = trained
    # A model of two heads for Ulysses.
    together = {**values, "output": str(tmp_path / "run"), "parallel": mesh}
    two_ranks.run(extended, together)
    for own, others in zip(metrics_of(values["output"]), metrics_of(together["output"]), strict=True):
        assert own[:2] == others[:2]
        # Sums in float32 in another order, over six steps.
        assert own[2] == pytest.approx(others[2], rel=1e-5)


def test_an_adapter_with_checkpointed_layers_trains_both_on_interleaved_rows(recipe_values):
    values = with_short_rows(recipe_values, LONGROPE, gradient_checkpointing=True, pattern="anchor")
    values["adapter"] = {"rank": 2}
    values["data"] = {**values["data"], "interleave": {"min_length": 8, "max_length": 64}}
    plain = with_stage({**values, "output": f"{values['output']}-plain"}, gradient_checkpointing=False)
    for each in (values, plain):
        extend(recipe_of(each))
    assert [line[:3] for line in metrics_of(values["output"])] == [
        line[:3] for line in metrics_of(plain["output"])
    ]
    config = json.loads((Path(values["output"]) / "model" / "config.json").read_text())
    assert config["rope_parameters"]["long_factor"] == FACTORS
    assert all(row.layout.is_interleaved for row in one_of_each(values["output"]))


def test_rows_that_were_packed_before_train_alike(trained, tmp_path):
    values, _, _ = trained
    rows = rows_of(values["output"])
    packed = {"rows": [str(rows.short.folder), str(rows.folder.folder)]}
    named = {**values, "output": str(tmp_path / "run"), "data": packed}
    extend(recipe_of(named))
    assert metrics_of(named["output"]) == metrics_of(values["output"])


def test_rows_of_one_kind_alone_are_refused(trained, tmp_path, capsys):
    values, _, _ = trained
    named = {
        **values,
        "output": str(tmp_path / "run"),
        "data": {"rows": [str(rows_of(values["output"]).folder.folder)]},
    }
    said = refused_new(capsys, tmp_path, named)
    assert (
        "stage 1 needs one folder of rows with context 128, pattern intra_document, positions reset" in said
    )
    assert "and documents_up_to 32, but data.rows names no such folder" in said


def refused_new(capsys, tmp_path, values) -> str:
    """The sentence with which a new run is refused, with exit status 2; it leaves no folder behind."""
    from ropewalk.cli.app import main
    from tests.training.resume_cases import write

    assert main(["extend", write(tmp_path / "recipe.yaml", values)]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert not (Path(values["output"]) / "checkpoints").exists()
    return line


REFUSED = [
    ({"short_rows": 0.0}, "short_rows must be more than 0 and less than 1, got 0"),
    ({"short_rows": 1.0}, "short_rows must be more than 0 and less than 1, got 1"),
    ({"short_rows": -0.5}, "short_rows must be more than 0 and less than 1, got -0.5"),
    ({"positions": "reset"}, "positions reset and short_rows contradict each other"),
    (
        {"steps": 1, "rows_per_step": 1, "rows_per_batch": 1},
        "short_rows 0.5 of the 1 rows of the stage are 0",
    ),
    ({"steps": 0, "rope": LONGROPE}, "short_rows 0.5 of the 0 rows of the stage are 0"),
    (
        {"rope": "none", "context": T},
        "short_rows trains short rows with the checkpoint's RoPE, which a stage with rope none drops",
    ),
    ({"rope": "default"}, "keeps the checkpoint's for both"),
    ({"rope": {"method": "auto", "candidates": ["ntk", "current"]}}, "rope auto chooses one among several"),
    ({"rope": {**LONGROPE, "short_factor": [1.1] * PAIRS}}, "leave short_factor out"),
]


@pytest.mark.parametrize(
    ("stage", "message"), REFUSED, ids=lambda each: each if isinstance(each, str) else None
)
def test_stages_that_contradict_short_rows_are_refused(recipe_values, tmp_path, capsys, stage, message):
    values = with_short_rows(recipe_values)
    assert message in refused_new(capsys, tmp_path, with_stage(values, **stage))


def test_recipes_that_contradict_short_rows_are_refused(recipe_values, tiny_checkpoint, tmp_path, capsys):
    values = with_short_rows(recipe_values, LONGROPE)
    assert "set exact_rope: true" in refused_new(capsys, tmp_path, {**values, "exact_rope": False})
    said = refused_new(capsys, tmp_path, {**values, "short_context": {}})
    assert "leave out short_context or short_rows" in said
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"text": f"{a} {b} rope"}) + "\n" for a in WORDS for b in WORDS))
    said = refused_new(
        capsys,
        tmp_path,
        {**values, "data": {**values["data"], "sources": [str(short)], "validation_documents": 2}},
    )
    assert "stage 1, long rows: there are no documents of more than 32 tokens to pack" in said
    assert "have 5 to 5 tokens" in said


def test_a_scaled_checkpoint_is_refused(recipe_values, tiny_checkpoint, tmp_path, capsys):
    import shutil

    folder = shutil.copytree(tiny_checkpoint, tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    said = refused_new(capsys, tmp_path, with_short_rows({**recipe_values, "model": str(folder)}, "yarn"))
    assert (
        "stages.0.short_rows needs a checkpoint with unscaled or longrope RoPE, but the model has yarn RoPE"
        in said
    )


def test_short_rows_cannot_begin_or_end_within_a_stage(trained, tmp_path, capsys):
    values, _, _ = trained
    again = {**values, "output": str(tmp_path / "run")}
    with cut_off_after(3):
        extend(recipe_of(again))
    said = refused(capsys, tmp_path, with_stage(again, short_rows=0.25))
    assert "short_rows" in said
    assert "0.25" in said
