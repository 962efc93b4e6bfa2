"""Generation is the argmax of the logits, whatever the checkpoint's generation_config asks for."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from evaluation_cases import AnsweringModel, byte_tokenizer, tiny_llama
from ropewalk.evaluation.generation import generate_greedily
from ropewalk.integrations.models import attach
from ropewalk.rope import Default, RotaryEmbedding

PROMPT = [1, 40, 41, 42, 40, 41]


def argmax_chain(model: Any, prompt: list[int], new_tokens: int, eos: int | None) -> list[int]:
    ids = list(prompt)
    for _ in range(new_tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("attached", [False, True])
def test_equals_the_argmax_under_a_hostile_generation_config(attached: bool) -> None:
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer))
    expected = argmax_chain(tiny_llama(vocab_size=len(tokenizer)), PROMPT, 10, tokenizer.eos_token_id)
    if attached:
        attach(model)
    hostile = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        suppress_tokens=expected[:1],
        min_new_tokens=20,
        max_length=7,
        num_beams=1,
    )
    model.generation_config = hostile
    assert generate_greedily(model, tokenizer, PROMPT, 10) == expected
    assert model.generation_config is hostile


def test_ends_with_the_ending_token() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer))
    chain = argmax_chain(model, PROMPT, 10, None)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(chain[3])
    assert generate_greedily(model, tokenizer, PROMPT, 10) == chain[: chain.index(chain[3]) + 1]


def test_rope_that_depends_on_the_length_is_fixed_for_prompt_and_answer() -> None:
    tokenizer = byte_tokenizer()
    rotary = RotaryEmbedding({None: Default(8, 10000.0)}, style="halves")
    seen: list[int | None] = []

    def answer(prompt: str, number: int) -> str:
        seen.append(rotary.total_length)
        return "x"

    generate_greedily(AnsweringModel(tokenizer, answer, rotary).eval(), tokenizer, PROMPT, 10)
    assert seen == [len(PROMPT) + 10]
    assert rotary.total_length is None
