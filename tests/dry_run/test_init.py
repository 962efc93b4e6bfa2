"""The proposed recipe is valid for any model, documents and machine, and says what it was made from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.dry_run.init import (
    DocumentFacts,
    InitSettings,
    MachineFacts,
    named_machine,
    propose,
    reason_for_adapter,
    recipe_of,
)
from ropewalk.errors import RopewalkError
from ropewalk.planning import PlanSettings, plan
from ropewalk.planning.run import PlanResult
from ropewalk.planning.sizing.time import GPUS
from ropewalk.training import extend, mesh_choice
from ropewalk.training.memory_need import Need
from ropewalk.training.recipe.file import parse_recipe
from tests.checkpoint_cases import path_of
from tests.models import every_family

LAPTOP = MachineFacts(8, 0, 0, 2**36)
TARGETS = {"llama-3.1-8b": 2**20, "llama-2-7b": 2**15, "qwen3-8b": 2**17}
PLANS = {
    name: plan(PlanSettings(model=str(path_of(name)), target=target)) for name, target in TARGETS.items()
}


def asked(planned: PlanResult, **changes: object) -> InitSettings:
    values = {
        "model": planned.config.model,
        "documents": ("books", "hf:a/b"),
        "target": planned.target_length,
    }
    return InitSettings(**{**values, **changes})


@given(
    st.sampled_from(sorted(PLANS)),
    st.integers(0, 10**12),
    st.integers(1, 10**6),
    st.sampled_from([LAPTOP, MachineFacts(192, 8, 80 * 2**30, 2**36)]),
)
def test_every_proposal_is_a_valid_recipe(name: str, tokens: int, read: int, machine: MachineFacts) -> None:
    planned = PLANS[name]
    documents = DocumentFacts(read, read < 20_000, tokens, min(tokens, 5000))
    adapter = "for want of room" if machine is LAPTOP else None
    fits = int(0.9 * tokens) // len(planned.stages) >= planned.target_length
    if not fits:
        with pytest.raises(RopewalkError, match=f"about {tokens:,} tokens, too few for a row"):
            recipe_of(asked(planned), planned, documents, machine, adapter)
        return
    recipe = parse_recipe(recipe_of(asked(planned), planned, documents, machine, adapter), "x")
    assert [source.path for source in recipe.data.sources] == ["books", "hf:a/b"]
    assert [stage.context for stage in recipe.stages] == [stage.context for stage in planned.stages]
    for stage, wanted in zip(recipe.stages, planned.stages, strict=True):
        assert stage.rope.limiting.method == wanted.recipe_method
        # No token is planned for twice.
        assert stage.steps * stage.rows_per_step * stage.context <= tokens // len(recipe.stages)
        assert stage.rows_per_step & (stage.rows_per_step - 1) == 0
        assert stage.warmup_steps < stage.steps
    assert (recipe.adapter is not None) == (adapter is not None)


def test_an_adapter_is_proposed_where_the_gpus_are_too_small_for_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_choice, "played_need", lambda resolved, number: Need(10**9, 0))
    stated = json.loads(path_of("llama-2-7b").read_text())
    whole = {**stated, "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    planned = plan(PlanSettings(model=str(tmp_path), target=2**15))
    reason = reason_for_adapter(planned, MachineFacts(16, 1, 24 * 2**30, 2**36))
    assert reason is not None
    documents = DocumentFacts(9, True, 10**8, 10**5)
    recipe = recipe_of(asked(planned), planned, documents, LAPTOP, reason)
    assert f"# An adapter: {reason}" in recipe
    assert parse_recipe(recipe, "x").adapter is not None
    assert reason_for_adapter(planned, MachineFacts(192, 64, 80 * 2**30, 2**36)) is None
    assert reason_for_adapter(planned, LAPTOP) is None
    # A config that lacks a size is proposed as it is.
    assert reason_for_adapter(PLANS["llama-2-7b"], MachineFacts(16, 1, 24 * 2**30, 2**36)) is None


def test_an_adapter_is_proposed_where_the_states_of_a_hybrid_alone_are_too_large(tmp_path: Path) -> None:
    every_family.tiny_config("falcon_h1").save_pretrained(tmp_path)
    planned = plan(PlanSettings(model=str(tmp_path), target=2**17))
    # Parameters, gradients and two moments in float32, whatever its mixers save.
    states = 16 * 53_072
    reason = reason_for_adapter(planned, MachineFacts(16, 2, states // 2, 2**36))
    assert reason is not None
    assert "even with parallel: {sequence: 2}, a rank needs" in reason
    assert reason_for_adapter(planned, MachineFacts(16, 2, 2**36, 2**36)) is None


def test_the_embedded_model_and_documents(tmp_path: Path) -> None:
    settings = InitSettings(
        model="embedded", documents=("embedded:validation",), target=1024, out=tmp_path / "a.yaml"
    )
    found = propose(settings)
    assert settings.out.read_text() == found.text
    assert found.documents.complete
    for sentence in ("base 313,145 from the rule critical-dimension", f"{found.documents.tokens:,} tokens"):
        assert sentence in found.text
    with pytest.raises(RopewalkError, match="already exists"):
        propose(settings)


def test_the_machine_that_trains_can_be_named(tmp_path: Path) -> None:
    stated = json.loads(path_of("llama-3.1-8b").read_text())
    whole = {**stated, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    planned = plan(PlanSettings(model=str(tmp_path), target=2**18))
    documents = DocumentFacts(9, True, 10**8, 10**6)
    found = {}
    for gpus, gpu in ((8, "h100"), (1, "4090")):
        settings = asked(planned, gpus=gpus, gpu=gpu, out=Path("r.yaml"))
        machine = named_machine(settings)
        assert (machine.gpus, machine.gpu_bytes) == (gpus, GPUS[gpu].bytes_per_rank)
        found[gpu] = recipe_of(settings, planned, documents, machine, reason_for_adapter(planned, machine))
    assert parse_recipe(found["h100"], "x").adapter is None
    assert "torchrun --nproc-per-node 8 -m ropewalk extend r.yaml" in found["h100"]
    assert "# For 8 GPUs (h100) of 80 GB." in found["h100"]
    assert parse_recipe(found["4090"], "x").adapter is not None
    assert "does not fit on 1 GPU (4090)" in found["4090"]
    assert "ropewalk plan r.yaml --gpus 1 --gpu 4090, then ropewalk extend r.yaml" in found["4090"]
    # Nothing is said of the one that the recipe is written on.
    assert "This machine" not in found["h100"]


def test_a_named_machine_has_the_defaults_of_a_plan() -> None:
    machine = named_machine(asked(PLANS["qwen3-8b"], memory_gb=40))
    assert (machine.named, machine.gpus, machine.gpu_bytes) == ("h100", 8, 40 * 10**9)
    assert not asked(PLANS["qwen3-8b"]).for_another_machine


def test_what_the_publisher_documents_stands_at_the_top() -> None:
    planned = PLANS["qwen3-8b"]
    text = recipe_of(asked(planned), planned, DocumentFacts(9, True, 10**8, 10**5), LAPTOP, None)
    assert "from 32,768 to 131,072 tokens" in text
    assert "# Note: max_position_embeddings is 40960, but Qwen3 4B, 8B, 14B or 32B" in text
    assert "# Note: without training, the publisher of Qwen3" in text


def test_names_with_any_characters_are_written_as_they_are(tmp_path: Path) -> None:
    planned = PLANS["qwen3-8b"]
    documents = DocumentFacts(9, True, 10**8, 10**5)
    paths = ("docs\U0001f600", "a: b #c", "'\"\\")
    text = recipe_of(asked(planned, documents=paths), planned, documents, LAPTOP, None)
    assert tuple(source.path for source in parse_recipe(text, "x").data.sources) == paths


def test_nothing_is_written_for_what_cannot_be_extended(tmp_path: Path) -> None:
    out = tmp_path / "a.yaml"
    (tmp_path / "short.txt").write_text("too short")
    good = InitSettings(model="embedded", documents=("embedded",), target=1024, out=out)
    for changes, words in (
        ({"documents": (str(tmp_path / "short.txt"),)}, "too few for a row of 1,024"),
        ({"documents": (str(tmp_path / "nowhere"),)}, "no file or folder"),
        ({"target": 128}, "must be above the trained length"),
        ({"rule": "magic"}, "magic"),
        ({"text_field": "text", "model": str(tmp_path)}, "config.json"),
    ):
        with pytest.raises(RopewalkError, match=words):
            propose(good.model_copy(update=changes))
        assert not out.exists()


def test_documents_that_are_all_short_are_warned_about() -> None:
    planned = PLANS["qwen3-8b"]
    many = DocumentFacts(20_000, False, 10**10, 900)
    text = recipe_of(asked(planned), planned, many, LAPTOP, None)
    assert "None of the first 20,000 documents reaches 131,072 tokens (the longest has about 900)" in text
    assert "20,000 documents and more" in text
    assert "Only these were counted: raise steps below" in text
    for longest, told in ((131_071, True), (131_072, False)):
        text = recipe_of(asked(planned), planned, replace(many, longest=longest), LAPTOP, None)
        assert ("reaches 131,072 tokens" in text) == told


def records(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


LONG = "def f(x):\n    return x + 1\n" * 300


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"text": LONG, "content": "no"}, "text"),
        ({"content": LONG, "url": "x"}, "content"),
        ({"raw_content": LONG}, "raw_content"),
    ],
)
def test_the_usual_field_of_the_text_is_found(row: dict[str, str], field: str, tmp_path: Path) -> None:
    documents = (records(tmp_path / "a.jsonl", row, row), records(tmp_path / "b.jsonl", {"text": LONG}))
    out = tmp_path / "a.yaml"
    propose(InitSettings(model="embedded", documents=documents, target=1024, out=out))
    sources = parse_recipe(out.read_text(), "x").data.sources
    assert [each.text_field for each in sources] == [field, "text"]


@pytest.mark.parametrize(
    ("row", "given", "words"),
    [
        (
            {"page": LONG},
            None,
            "no text field 'text'; the fields are 'page'; set text_field .--text-field. to the field",
        ),
        (
            {"content": LONG, "body": "x"},
            None,
            "set text_field .--text-field. to the field that holds the text .probably 'content' or 'body'",
        ),
        (
            {"text": LONG},
            "page",
            "no text field 'page'; the fields are 'text'; set text_field .--text-field. to the field",
        ),
    ],
)
def test_a_field_that_is_not_clear_is_asked_for(
    row: dict[str, str], given: str | None, words: str, tmp_path: Path
) -> None:
    out, source = tmp_path / "a.yaml", records(tmp_path / "a.jsonl", row)
    with pytest.raises(RopewalkError, match=words):
        propose(InitSettings(model="embedded", documents=(source,), target=1024, out=out, text_field=given))
    assert not out.exists()


def test_a_machine_without_gpus_that_is_too_small_is_named(tmp_path: Path) -> None:
    config = json.loads(path_of("llama-3.1-8b").read_text())
    sizes = {"intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    planned = plan(PlanSettings(model=str(tmp_path / "config.json"), target=2**20))
    documents = DocumentFacts(9, True, 10**10, 10**6)
    # 8,030,261,248 parameters of 16 bytes.
    states = 8_030_261_248 * 16
    for memory, gpus, told in ((states - 1, 0, True), (states, 0, False), (1, 8, False)):
        text = recipe_of(asked(planned), planned, documents, MachineFacts(2, gpus, 80 * 2**30, memory), None)
        assert ("# Not for this machine: it has no GPU and 128.5 GB of memory" in text) == told
        assert parse_recipe(text, "x").model == planned.config.model


@pytest.mark.slow
def test_a_proposed_recipe_trains_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe as it is written, but for the slowest part of its evaluation."""
    monkeypatch.chdir(tmp_path)
    source = records(
        tmp_path / "a.jsonl", *({"content": f"# {number}\n{LONG[:2000]}"} for number in range(10))
    )
    found = propose(InitSettings(model="embedded", documents=(source,), target=512, out=Path("recipe.yaml")))
    recipe = parse_recipe(found.text, "recipe.yaml")
    recipe = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"suites": ["perplexity"]})}
    )
    result = extend(recipe)
    assert [each.context for each in recipe.stages] == [512]
    assert (result.model / "model.safetensors").is_file()
    assert json.loads((result.model / "config.json").read_text())["max_position_embeddings"] == 512
