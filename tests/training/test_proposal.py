"""The proposed recipe is valid for any model, documents and machine, and says what it was made from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data import load_tokenizer
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from ropewalk.planning import PlanSettings, plan
from ropewalk.planning.run import PlanResult
from ropewalk.training.proposal import (
    DocumentFacts,
    InitSettings,
    MachineFacts,
    look_at,
    propose,
    reason_for_adapter,
    recipe_of,
)
from ropewalk.training.recipe.file import parse_recipe
from tests.checkpoint_cases import path_of
from tests.models import every_family

LAPTOP = MachineFacts(8, 0, 0)
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
    st.sampled_from([LAPTOP, MachineFacts(192, 8, 80 * 2**30)]),
)
def test_every_proposal_is_a_valid_recipe(name: str, tokens: int, read: int, machine: MachineFacts) -> None:
    planned = PLANS[name]
    documents = DocumentFacts(read, read < 20_000, tokens, min(tokens, 5000))
    adapter = reason_for_adapter(planned, machine)
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


def test_an_adapter_is_proposed_where_the_gpus_are_too_small_for_all_weights(tmp_path: Path) -> None:
    stated = json.loads(path_of("llama-2-7b").read_text())
    whole = {**stated, "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    planned = plan(PlanSettings(model=str(tmp_path), target=2**15))
    reason = reason_for_adapter(planned, MachineFacts(16, 1, 24 * 2**30))
    assert reason is not None
    documents = DocumentFacts(9, True, 10**8, 10**5)
    recipe = recipe_of(asked(planned), planned, documents, LAPTOP, reason)
    assert f"# An adapter: {reason}" in recipe
    assert parse_recipe(recipe, "x").adapter is not None
    assert reason_for_adapter(planned, MachineFacts(192, 64, 80 * 2**30)) is None
    assert reason_for_adapter(planned, LAPTOP) is None
    # A config that lacks a size is proposed as it is.
    assert reason_for_adapter(PLANS["llama-2-7b"], MachineFacts(16, 1, 24 * 2**30)) is None


def test_an_adapter_is_proposed_where_the_states_of_a_hybrid_alone_are_too_large(tmp_path: Path) -> None:
    every_family.tiny_config("falcon_h1").save_pretrained(tmp_path)
    planned = plan(PlanSettings(model=str(tmp_path), target=2**17))
    # Parameters, gradients and two moments in float32, whatever its mixers save.
    states = 16 * 53_072
    reason = reason_for_adapter(planned, MachineFacts(16, 2, states // 2 - 1))
    assert reason is not None
    assert "its 53,072 parameters, with gradients and moments, take" in reason
    assert reason_for_adapter(planned, MachineFacts(16, 2, states // 2)) is None


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
    assert "the model will meet few long dependencies" in text
    assert "20,000 documents and more" in text
    assert "Only these were counted: raise steps below" in text
    assert "few long dependencies" not in recipe_of(
        asked(planned), planned, replace(many, longest=10**6), LAPTOP, None
    )


def test_long_documents_are_counted_from_their_beginnings(tmp_path: Path) -> None:
    class Counting:
        """A tokenizer that remembers how much text it was given."""

        characters = 0

        def encode_batch_fast(self, texts: list[str], **options: object) -> list[object]:
            self.characters += sum(map(len, texts))
            return list(real.backend_tokenizer.encode_batch_fast(texts, **options))

        @property
        def backend_tokenizer(self) -> "Counting":
            return self

    real, counting = load_tokenizer("embedded"), Counting()
    sentence = "def f(x):\n    return x + 1\n"
    texts = [sentence * times for times in (3, 20, 3000)]
    for name, text in enumerate(texts):
        (tmp_path / f"{name}.txt").write_text(text)
    found = look_at([SourceSpec(path=str(tmp_path))], counting, RunContext())
    exact = [len(real.backend_tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert counting.characters < 25_000 < len(texts[-1])
    assert found.tokens == pytest.approx(sum(exact), rel=0.02)
    assert found.longest == pytest.approx(max(exact), rel=0.02)
