"""The text of a proposed recipe is valid for any model, documents and machine, and warns of what is doubtful."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data.tokens.special_ids import Doubt, TokenUse
from ropewalk.dry_run.draft import STEP_TOKENS, Draft, StageChoice
from ropewalk.dry_run.facts import DocumentFacts, MachineFacts
from ropewalk.errors import RopewalkError
from ropewalk.planning import PlanSettings, plan
from ropewalk.planning.practice import practice_for
from ropewalk.training.recipe.file import parse_recipe
from tests.checkpoint_cases import path_of
from tests.dry_run.proposal_cases import LAPTOP, PLANS, asked, recipe_of


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


def test_a_stage_that_fits_nowhere_is_warned_about() -> None:
    planned = PLANS["qwen3-8b"]
    draft = Draft(
        asked(planned),
        planned,
        LAPTOP,
        practice_for(8 * 10**9),
        DocumentFacts(9, True, 10**8, 10**6),
        choices={0: StageChoice({}, "too much", fits=False)},
    )
    assert "Stage 1 does not fit: too much." in draft.warnings
    assert "# Stage 1 does not fit: too much." in draft.text()


def test_few_tokens_are_warned_about() -> None:
    planned = PLANS["qwen3-8b"]
    least = practice_for(8 * 10**9).least_tokens
    for tokens, complete, told in ((least - 1, True, True), (least, True, False), (least - 1, False, False)):
        facts = DocumentFacts(9, complete, tokens, 10**6)
        text = recipe_of(asked(planned), planned, facts, LAPTOP, None)
        assert (f"About {tokens:,} tokens are few" in text) == told


def test_steps_are_said_to_come_from_the_documents_with_those_of_published_runs() -> None:
    planned = PLANS["qwen3-8b"]
    practice = practice_for(8 * 10**9)
    few = recipe_of(asked(planned), planned, DocumentFacts(5, True, 150_000, 10**5), LAPTOP, None)
    line = next(line for line in few.splitlines() if line.startswith("  # Steps: "))
    assert (
        "1 step of 131,072 tokens, from the tokens of the documents found; if these are only samples" in line
    )
    rows, least, most = map(int, re.findall(r"rows_per_step: (\d+) and steps: (\d+) to (\d+)", line)[0])
    for steps, tokens in ((least, practice.least_tokens), (most, practice.most_tokens)):
        assert steps * rows * 2**17 <= tokens < (steps + 1) * rows * 2**17
    assert rows * 2**17 == STEP_TOKENS
    enough = DocumentFacts(10**6, False, practice.least_tokens, 10**5)
    many = recipe_of(asked(planned), planned, enough, LAPTOP, None)
    assert "from the tokens of the documents found." in many
    assert "only samples" not in many
    assert "# Steps: 2,000 steps of 524,288 tokens, as no documents were named." in recipe_of(
        asked(planned), planned, None, LAPTOP, None
    )


def test_tokens_of_chats_are_warned_about_beside_what_to_write() -> None:
    planned = PLANS["qwen3-8b"]
    doubts = (Doubt("eos_token", "<|im_end|>", "<|endoftext|>"),)
    tokens = (TokenUse("document end", "<|im_end|>", "eos_token", False),)
    facts = DocumentFacts(9, True, 10**8, 10**6)
    practice = practice_for(8 * 10**9)
    draft = Draft(asked(planned), planned, LAPTOP, practice, facts, tokens=tokens, doubts=doubts)
    assert any(each.startswith("the tokenizer's eos_token <|im_end|> marks turns") for each in draft.warnings)
    text = draft.text()
    assert "  # Tokens added to documents: document end <|im_end|> (eos_token)." in text
    line = '  # eos_token: "<|endoftext|>"\n'
    assert line in text
    sources = '  sources: ["books"]\n'
    text = text.replace("  sources:\n", sources)
    assert parse_recipe(text.replace(line, line.replace("# ", "")), "x").data.eos_token == "<|endoftext|>"
    assert parse_recipe(text, "x").data.eos_token is None
