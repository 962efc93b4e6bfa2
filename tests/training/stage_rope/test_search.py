"""Progressive extension: search, train, swap, search again without training, short factors, and the exported result."""

import json
import math
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

import ropewalk.search.loop as ledger
import ropewalk.training.stage_rope.decide as decide_module
import ropewalk.training.stage_rope.search as factor_search
from ropewalk import ModelSetup, RopewalkError, load_model
from ropewalk.data import open_rows
from ropewalk.data.read.draw import drawn
from ropewalk.evaluation import evaluation_rows
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.models.compute.losses import OutputHead
from ropewalk.reporting.run.training import write_run_report
from ropewalk.rope import Default, Linear, LongRope
from ropewalk.search import Candidate, Ledger, read_factors
from ropewalk.search.data import rows_digest, search_rows
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.stage_rope.search import checkpoint_digest
from tests.evaluation.evaluation_cases import perplexity_by_position
from tests.programs import run_interpreter
from tests.training.run_cases import extend, extended

ORIGINAL, TARGET = 32, 256
PAIRS = 4
DOCUMENTS = 2
VALIDATION = 60
FORWARDS = (14, 14, 14, 20)
FILES = ("factors-stage1", "factors-stage2", "factors-stage3", "factors-short")


def recipe_of(values):
    return parse_recipe(yaml.safe_dump(values), "test")


def stages():
    """Search and train, search on the recipe's model and train, search and train no more."""
    search = {"budget": 14, "documents": DOCUMENTS}
    train = {"pattern": "full", "rows_per_step": 2, "learning_rate": 1e-2}
    of_model = {**search, "weights": "checkpoint"}
    return [
        {**train, "context": 64, "steps": 4, "rope": {"method": "longrope", "search": search}},
        {**train, "context": 128, "steps": 2, "rope": {"method": "longrope", "search": of_model}},
        {**train, "context": TARGET, "steps": 0, "rope": {"method": "longrope", "search": search}},
    ]


def values_of(tiny_checkpoint, tiny_documents, output):
    return {
        "model": str(tiny_checkpoint),
        "output": str(output),
        "data": {"sources": [str(tiny_documents)], "validation_documents": VALIDATION},
        "stages": stages(),
        "short_context": {"budget": 20, "documents": 1, "largest": 1.5},
        "evaluation": {"suites": ["perplexity"], "rows": 2},
        "seed": 5,
    }


@pytest.fixture
def progressive(tiny_checkpoint, tiny_documents, tmp_path):
    """The values of such a recipe, to change."""
    return values_of(tiny_checkpoint, tiny_documents, tmp_path / "run")


class Told:
    """A reporter that remembers what it was told."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    def bar(self, label, total):
        from ropewalk.io.progress import Silent

        return Silent().bar(label, total)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_checkpoint, tiny_documents):
    """One finished run: its folder, its summary, and what it said."""
    output = tmp_path_factory.mktemp("longrope") / "whole"
    said = Told()
    summary = extend(recipe_of(values_of(tiny_checkpoint, tiny_documents, output)), reporter=said)
    return output, summary, said.lines


def table(output, name):
    """A factor table of a run without what a clock has measured."""
    found = read_factors(output / f"{name}.json")
    return found.model_copy(update={"search": found.search.model_copy(update={"seconds": 0.0})})


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def published(length):
    return math.sqrt(1 + math.log(length / ORIGINAL) / math.log(ORIGINAL))


def held_out(output):
    """The documents that the run holds out, tokenised, as it draws them."""
    folder = json.loads((output / "rows.json").read_text())["rows"][0]
    seed = yaml.safe_load((output / "recipe.yaml").read_text())["seed"]
    return [document.input_ids for document in drawn(open_rows(output / folder).validation, seed)]


def perplexity(model, rows, length):
    found = perplexity_by_position(model, OutputHead.of(model), rows, [0, length])
    return found.overall.perplexity


@pytest.mark.slow
def test_each_stage_trains_and_saves_with_the_factors_that_it_found(finished):
    output, summary, _ = finished
    for number, (context, step) in enumerate([(64, 4), (128, 2), (TARGET, 0)]):
        found = table(output, FILES[number])
        config = config_of(output / "checkpoints" / f"stage{number}-step{step:06d}")
        rope = config["rope_parameters"]
        assert rope["rope_type"] == "longrope"
        assert tuple(rope["long_factor"]) == found.long_factor == found.best.rescale_factors
        assert rope["short_factor"] == [1.0] * PAIRS
        # Of the stage's own length, and not of the last one's.
        assert rope["attention_factor"] == pytest.approx(published(context), rel=1e-12)
        assert rope["original_max_position_embeddings"] == ORIGINAL
        assert config["max_position_embeddings"] == found.target_length == context
        assert summary["stages"][number]["search"]["perplexity"] == found.best.objective
    assert len({table(output, name).best.rescale_factors for name in FILES[:3]}) == 3


def test_the_final_config_has_the_last_long_factors_and_the_short_ones(finished):
    output, summary, _ = finished
    config = config_of(summary["model"])
    rope = config["rope_parameters"]
    assert tuple(rope["long_factor"]) == table(output, "factors-stage3").long_factor
    assert tuple(rope["short_factor"]) == table(output, "factors-short").short_factor
    assert 1.0 < max(rope["short_factor"]) <= 1.5
    assert rope["attention_factor"] == pytest.approx(published(TARGET), rel=1e-12)
    assert config["max_position_embeddings"] == TARGET


def test_a_stage_of_no_steps_leaves_every_weight_as_it_was(finished):
    output, summary, _ = finished
    before = load_file(output / "checkpoints" / "stage1-step000002" / "model.safetensors")
    for folder in (output / "checkpoints" / "stage2-step000000", Path(summary["model"])):
        after = load_file(folder / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_search_measures_on_the_weights_that_the_recipe_says(finished, tiny_checkpoint):
    """Each objective is the perplexity of that checkpoint, loaded with the factors, on documents held out."""
    output, summary, _ = finished
    folders = {
        "factors-stage1": tiny_checkpoint,
        "factors-stage2": tiny_checkpoint,
        "factors-stage3": output / "checkpoints" / "stage1-step000002",
        "factors-short": output / "checkpoints" / "stage2-step000000",
    }
    for name, folder in folders.items():
        found = table(output, name)
        length, count = found.target_length, found.search.documents
        rows, others = search_rows(held_out(output)[::-1], length, 0, None, count, count)
        assert found.search.documents_sha256 == rows_digest(rows.rows)
        assert found.held_out.documents_sha256 == rows_digest(others.rows)
        factors = found.best.rescale_factors
        scale = published(TARGET if name == "factors-short" else length)
        method = LongRope(2 * PAIRS, 1e4, factors, factors, scale, ORIGINAL)
        model = load_model(folder, ModelSetup(rope=method, max_position_embeddings=TARGET))
        # The same arithmetic in another order of summation over rows.
        assert found.best.objective == pytest.approx(perplexity(model, rows.rows, length), rel=1e-6)
        assert found.held_out.best == pytest.approx(perplexity(model, others.rows, length), rel=1e-6)
        if name == "factors-stage2":
            # What it had to beat there is interpolation of that model, and not on top of the stage before.
            model = load_model(folder, ModelSetup(rope=Linear(2 * PAIRS, 1e4, length / ORIGINAL)))
            assert found.baselines["pi"] == pytest.approx(perplexity(model, rows.rows, length), rel=1e-6)
    assert summary["short_factors"]["baselines"].keys() == {"original", "long"}


def test_the_original_length_is_measured_before_and_after(finished, tiny_checkpoint):
    output, summary, _ = finished
    for when in ("before", "after"):
        assert [result["length"] for result in summary[when]] == [TARGET, ORIGINAL]
    rows = evaluation_rows(held_out(output), ORIGINAL, 0, None, 2).rows
    short = summary["short_context"]
    assert short["length"] == ORIGINAL
    before = load_model(tiny_checkpoint, ModelSetup(rope=Default(2 * PAIRS, 1e4)))
    assert short["before"] == pytest.approx(perplexity(before, rows, ORIGINAL), rel=1e-6)
    factors = table(output, "factors-short").short_factor
    only_short = LongRope(2 * PAIRS, 1e4, factors, (9.0,) * PAIRS, published(TARGET), ORIGINAL)
    after = load_model(summary["model"], ModelSetup(rope=only_short))
    assert short["after"] == pytest.approx(perplexity(after, rows, ORIGINAL), rel=1e-6)
    assert short["ratio"] == short["after"] / short["before"]


def test_notes_and_report_say_what_was_found(finished):
    output, summary, said = finished
    assert any(
        "stage 3: 256 tokens, longrope with factors to be searched in the run" in line for line in said
    )
    assert any(
        line.startswith("stage 1: factors for 64 tokens from a search of 14 forward passes") for line in said
    )
    files = write_run_report(output)
    page = files[0].read_text()
    assert {path.name for path in files} == {"report.html", "perplexity.png", "training.png", "factors.png"}
    assert "Short context" in page
    assert f"perplexity at 32 tokens {summary['short_context']['before']:.3f} before" in page
    assert "factors for 256 tokens from a search of 14 forward passes on 2 held-out rows" in page
    assert "not trained" in page


PLAIN = """
import sys, torch, transformers
folder, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
ids = torch.load(out + "/ids.pt")
with torch.no_grad():
    torch.save([model(each).logits for each in ids], out + "/logits.pt")
assert not [name for name in sys.modules if name.startswith("ropewalk")]
"""


@pytest.mark.slow
def test_plain_transformers_gives_the_same_logits_below_and_above_the_original_length(finished, tmp_path):
    _, summary, _ = finished
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 16, (1, n), generator=generator) for n in (ORIGINAL - 5, ORIGINAL, TARGET)]
    torch.save(ids, tmp_path / "ids.pt")
    run_interpreter(PLAIN, summary["model"], tmp_path).check_returncode()
    ours = load_model(summary["model"])
    for each, plain in zip(ids, torch.load(tmp_path / "logits.pt"), strict=True):
        with torch.no_grad():
            difference = (ours(each).logits - plain).abs().max()
        # Angles of up to 256 rad rounded to float32 (2**-16 rad), through two layers, against exact ones.
        assert difference < 1e-4


class CutOff(BaseException):
    """Stands for the end of the process: nothing may catch it."""


@pytest.mark.slow
def test_cut_off_in_a_search_and_resumed_it_is_the_same_run(finished, progressive, monkeypatch):
    """Before its first forward pass, in the first search, after training, and in that of the short factors."""
    whole, expected, _ = finished
    output = Path(progressive["output"])
    seen, last = [], [0]

    class Counting(Ledger):
        def add(self, job, loss):
            if len(seen) == last[0]:
                raise CutOff
            seen.append(job)
            super().add(job, loss)

    monkeypatch.setattr(ledger, "Ledger", Counting)
    for number, (search, forwards) in enumerate([(0, 0), (0, 5), (2, 3), (3, 4)]):
        last[0] = sum(FORWARDS[:search]) + forwards
        with pytest.raises(CutOff):
            extend(recipe_of(progressive), resume=number > 0)
        # What was measured before is not measured again.
        assert len(seen) == last[0]
        log = (output / f"{FILES[search]}.jsonl").read_text()
        assert log.count("\n") == 1 + forwards
        # Killed while a line was written.
        (output / f"{FILES[search]}.jsonl").write_text(log + '{"rescale_fac')
    last[0] = -1
    summary = extend(recipe_of(progressive), resume=True)
    assert len(seen) == sum(FORWARDS)
    for name in FILES:
        assert table(output, name) == table(whole, name)
    assert summary["stages"] == expected["stages"]
    assert summary["after"] == expected["after"]
    assert config_of(summary["model"]) == config_of(expected["model"])


def test_a_finished_run_resumed_searches_no_more(finished, tiny_checkpoint, tiny_documents, monkeypatch):
    output, summary, _ = finished
    monkeypatch.setattr(factor_search, "find", None)
    again = extend(recipe_of(values_of(tiny_checkpoint, tiny_documents, output)), resume=True)
    assert again["stages"] == summary["stages"]
    assert again["short_context"] == summary["short_context"]


@pytest.mark.slow
def test_two_processes_find_the_same_factors(finished, progressive, two_ranks):
    whole, expected, _ = finished
    progressive["parallel"] = {"shard": 2}
    summary, _ = two_ranks.run(extended, progressive)
    output = Path(progressive["output"])
    # On the recipe's own weights to the last bit; after training within the rounding of other sums.
    for name in FILES[:2]:
        assert table(output, name) == table(whole, name)
    found, wanted = (table(each, "factors-stage3") for each in (output, whole))
    assert found.best.objective == pytest.approx(wanted.best.objective, rel=1e-4)
    # A checkpoint in shards has no weights file of its own: what its record says of its files stands for it.
    for name, step in (("factors-stage3", "stage1-step000002"), ("factors-short", "stage2-step000000")):
        known = checkpoint_digest(output / "checkpoints" / step)
        assert table(output, name).model.digest == known
        assert len(known) == 64
        assert table(whole, name).model.digest == model_digest(str(whole / "checkpoints" / step))
    assert checkpoint_digest(output / "checkpoints" / "stage1-step000002") != known
    for when in ("before", "after"):
        for two, one in zip(summary[when], expected[when], strict=True):
            assert two["score"] == pytest.approx(one["score"], rel=1e-3)
    assert summary["short_context"]["ratio"] == pytest.approx(expected["short_context"]["ratio"], rel=1e-3)


def without_training(progressive):
    stage = {
        "context": 128,
        "steps": 0,
        "rope": {"method": "longrope", "search": {"budget": 9, "documents": 2}},
    }
    return {**progressive, "stages": [stage]}


def test_a_search_without_training_packs_nothing(progressive, tiny_checkpoint):
    summary = extend(recipe_of(without_training(progressive)))
    output = Path(progressive["output"])
    assert not (output / "data").exists()
    assert not (output / "rows.json").exists()
    before, after = (load_file(Path(f) / "model.safetensors") for f in (tiny_checkpoint, summary["model"]))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert summary["stages"][0]["rows"] == summary["stages"][0]["tokens"] == 0
    assert not (output / "training.png").exists()
    assert "training.png" not in {path.name for path in write_run_report(output)}
    assert extend(recipe_of(without_training(progressive)), resume=True)["after"] == summary["after"]


def test_the_short_penalty_measures_at_the_length_trained_for(progressive):
    values = without_training(progressive)
    values["stages"][0]["rope"]["search"] |= {"short_penalty": 1.0, "budget": 16}
    del values["short_context"]
    summary = extend(recipe_of(values))
    found = table(Path(progressive["output"]), "factors-stage1")
    assert found.search.short_penalty == 1.0
    assert found.forwards == 16
    assert summary["short_factors"] is None
    assert summary["stages"][0]["short_factor"] == [1.0] * PAIRS


def test_training_rows_are_searched_on_only_where_nothing_is_held_out(progressive):
    progressive["data"]["validation_documents"] = 0
    progressive["evaluation"] = {"suites": []}
    progressive["stages"] = [{**stages()[0], "steps": 1}]
    del progressive["short_context"]
    summary = extend(recipe_of(progressive))
    assert summary["stages"][0]["search"]["text"] == "training rows"
    assert summary["stages"][0]["search"]["held_out"] is None
    assert summary["short_context"] is None


@pytest.mark.parametrize("harm", ["edited", "gone"])
@pytest.mark.parametrize("name", ["factors-stage2", "factors-short"])
def test_a_damaged_table_is_found_again_without_a_forward_pass(
    finished, tiny_checkpoint, tiny_documents, tmp_path, monkeypatch, harm, name
):
    output, summary, _ = finished
    copy = shutil.copytree(output, tmp_path / "copy")
    values = values_of(tiny_checkpoint, tiny_documents, copy)
    path = copy / f"{name}.json"
    written = table(copy, name)
    edited = json.loads(path.read_text())
    path.unlink()
    if harm == "edited":
        edited["budget"] = 1
        path.write_text(json.dumps(edited))
    log = path.with_suffix(".jsonl").read_text()
    again = extend(recipe_of(values), resume=True)
    assert table(copy, name) == written
    assert path.with_suffix(".jsonl").read_text() == log
    assert again["after"] == summary["after"]
    assert not (copy / "earlier").exists()


@pytest.mark.parametrize("step", ["rope-2", "short"])
def test_a_search_whose_record_is_lost_is_found_again_and_nothing_else_is_done(
    finished, tiny_checkpoint, tiny_documents, tmp_path, monkeypatch, step
):
    """Although the second search takes another time, and other versions of software ran it."""
    output, summary, _ = finished
    copy = shutil.copytree(output, tmp_path / "copy")
    values = values_of(tiny_checkpoint, tiny_documents, copy)
    (copy / "steps" / f"{step}.json").unlink()
    records = {path.name: path.read_bytes() for path in (copy / "steps").iterdir()}
    clock = SimpleNamespace(perf_counter=count(step=1000.0).__next__)
    monkeypatch.setattr("ropewalk.search.run.time", clock)
    monkeypatch.setattr("ropewalk.search.run.software_versions", lambda: {"ropewalk": "another"})
    again = extend(recipe_of(values), resume=True)
    name = "factors-short" if step == "short" else "factors-stage2"
    assert table(copy, name).best == table(output, name).best
    assert read_factors(copy / f"{name}.json").search.seconds == 1000
    assert {
        path.name: path.read_bytes() for path in (copy / "steps").iterdir() if path.stem != step
    } == records
    assert not (copy / "earlier").exists()
    assert again["stages"] == summary["stages"]


def test_a_stage_whose_factors_turn_out_to_be_others_is_refused_and_nothing_has_moved(
    finished, tiny_checkpoint, tiny_documents, tmp_path, monkeypatch
):
    output, _, _ = finished
    copy = shutil.copytree(output, tmp_path / "copy")
    values = values_of(tiny_checkpoint, tiny_documents, copy)
    (copy / "steps" / "rope-2.json").unlink()
    monkeypatch.setattr(decide_module, "candidate_of", lambda table: Candidate((1.5,) * PAIRS))
    with pytest.raises(
        RopewalkError, match=r"train-2 in .* began with something else: the result of rope-2 changed"
    ):
        extend(recipe_of(values), resume=True)
    assert not (copy / "earlier").exists()
    assert (copy / "model").is_dir()
    assert (copy / "evaluation-after.json").is_file()
