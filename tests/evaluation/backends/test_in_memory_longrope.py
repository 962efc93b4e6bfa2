"""LongRoPE in a model that generates: one choice of factors a sequence, start tokens wherever they are read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from ropewalk import RopewalkError
from ropewalk.evaluation.backends import in_memory as decoding
from ropewalk.evaluation.backends.likelihoods import causal_losses
from ropewalk.models.attention.kv_cache import cache_argument, cache_of
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.load import ModelSetup, attach, generating, load_model
from ropewalk.models.rope.rotary import rope_of
from ropewalk.rope import LongRope
from tests.longrope_cases import (
    ORIGINAL,
    TARGET,
    ByHand,
    factors,
    full_logits,
    rotated_by,
    rounding_allows,
    tiny,
    token_ids,
)

NEW = 12
PROMPT = ORIGINAL - 5
"""The prompt ends before the original length, the answer beyond it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("llama", "phi3"):
        found[family] = tmp_path_factory.mktemp("models") / family
        tiny(family).save_pretrained(found[family])
    return found


def loaded(folders: dict[str, Path], rope: LongRope, family: str = "llama") -> Any:
    return load_model(
        folders[family], ModelSetup(rope=rope, max_position_embeddings=TARGET), dtype=torch.float64
    )


def step_by_step(model: Any, ids: list[int], prompt: int, chunk: int) -> Tensor:
    """Logits of all positions: the prompt in chunks, then token by token, through one cache."""
    cache, found, start = DynamicCache(config=model.config), [], 0
    while start < len(ids):
        end = min(start + chunk, prompt) if start < prompt else start + 1
        with torch.no_grad():
            output = model(torch.tensor([ids[start:end]]), **cache_argument(cache), use_cache=True)
        found.append(output.logits[0])
        start = end
    return torch.cat(found)


def same(a: Tensor, b: Tensor) -> bool:
    # float64 sums in another order; the logits are of order ten.
    return float((a - b).abs().max()) < 1e-10


@pytest.mark.parametrize("start_tokens", [0, 7])
@pytest.mark.parametrize("chunk", [5, PROMPT])
def test_every_step_across_the_original_length_has_the_long_factors(
    folders: dict[str, Path], start_tokens: int, chunk: int
) -> None:
    rope = factors(8, start_tokens=start_tokens)
    model, ids = loaded(folders, rope), token_ids(PROMPT + NEW)
    with generating(model, len(ids)):
        steps = step_by_step(model, ids, PROMPT, chunk)
        for end in range(1, len(ids) + 1):
            assert same(steps[end - 1], full_logits(model, ids[:end])[-1])
    # The whole row, which says its length itself; and the short factors are something else.
    assert same(steps, full_logits(model, ids))
    with generating(model, ORIGINAL):
        assert not torch.allclose(steps, full_logits(model, ids), atol=0.1)


def test_a_sequence_that_ends_at_the_original_length_has_the_short_factors(folders: dict[str, Path]) -> None:
    model, ids = loaded(folders, factors(8)), token_ids(ORIGINAL)
    alone = full_logits(model, ids)
    assert same(step_by_step(model, ids, PROMPT, 5), alone)
    with generating(model, ORIGINAL + 1):
        assert not torch.allclose(full_logits(model, ids), alone, atol=0.1)


def test_plain_transformers_changes_the_factors_in_the_middle(folders: dict[str, Path]) -> None:
    """Why the length is fixed here: keys of the short factors meet queries of the long ones."""
    rope, ids = factors(8), token_ids(PROMPT + NEW)
    ours = loaded(folders, rope)
    plain = tiny(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": list(rope.short_factor),
            "long_factor": list(rope.long_factor),
            "attention_factor": rope.attention_factor,
            "factor": TARGET / ORIGINAL,
            "original_max_position_embeddings": ORIGINAL,
        },
        max_position_embeddings=TARGET,
    ).double()
    plain.load_state_dict(ours.state_dict())
    switching = step_by_step(plain, ids, PROMPT, PROMPT)
    short, long = [], []
    for found, length in ((short, ORIGINAL), (long, len(ids))):
        with generating(ours, length):
            found.append(full_logits(ours, ids))
    # Its angles are float32.
    assert torch.allclose(switching[:ORIGINAL], short[0][:ORIGINAL], atol=1e-3)
    for whole in (*short, *long):
        assert not torch.allclose(switching[ORIGINAL:], whole[ORIGINAL:], atol=0.1)


def test_a_switch_in_the_middle_is_refused_and_says_what_to_do(folders: dict[str, Path]) -> None:
    model, ids = loaded(folders, factors(8)), token_ids(PROMPT + NEW)
    message = (
        rf"the cache holds {ORIGINAL} keys computed with LongRoPE's short factors, but at a length of {ORIGINAL + 1} "
        r"tokens this call would use the long factors; .*generating\(model, number of prompt and new tokens together\)"
    )
    with pytest.raises(RopewalkError, match=message):
        step_by_step(model, ids, PROMPT, 5)
    prompt = torch.tensor([ids[:PROMPT]])
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with pytest.raises(RopewalkError, match=message):
        model.generate(prompt, **options)
    # A cache that was begun with the long factors goes on with them alone, also one that the call itself made.
    for given in (DynamicCache(config=model.config), None):
        with generating(model, len(ids)), torch.no_grad():
            cache = cache_of(model(prompt, **cache_argument(given), use_cache=True))
            model(torch.tensor([ids[PROMPT : PROMPT + 1]]), **cache_argument(cache))
        with pytest.raises(RopewalkError, match=r"long factors, but at .* would use the short factors"):
            model(torch.tensor([ids[PROMPT + 1 : PROMPT + 2]]), **cache_argument(cache))
    # A copy is as careful, and nothing is refused that cannot switch.
    with pytest.raises(RopewalkError, match=message):
        step_by_step(copy.deepcopy(model), ids, PROMPT, 5)
    attach(model)
    rope = factors(8)
    with rope_of(model, LongRope(8, 1e4, rope.long_factor, rope.long_factor, 1.2, ORIGINAL)):
        assert same(step_by_step(model, ids, PROMPT, 5), full_logits(model, ids))


def test_a_prompt_that_is_padded_is_as_long_as_its_positions_say(folders: dict[str, Path]) -> None:
    """20 tokens of padding and 40 of text are 40 tokens, whatever the cache holds."""
    model, ids = loaded(folders, factors(8)), token_ids(40)
    gap = ORIGINAL - 28
    mask = torch.tensor([[0] * gap + [1] * len(ids)])
    places = (mask.cumsum(1) - 1).clamp_min(0)
    row = torch.tensor([[0] * gap + ids])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (slice(0, 45), slice(45, 60)):
            seen = mask[:, : part.stop]
            output = model(
                row[:, part], attention_mask=seen, position_ids=places[:, part], **cache_argument(cache)
            )
    assert same(output.logits[0, -1], full_logits(model, ids)[-1])


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_generate_of_transformers_under_a_fixed_length_says_what_our_decoding_says(
    folders: dict[str, Path], family: str
) -> None:
    model, ids = loaded(folders, factors(8, start_tokens=3), family), token_ids(PROMPT)
    prompt = torch.tensor([ids])
    # Phi-3 before transformers 5.20 reads one token alone where it throws its cache away.
    loses_its_cache = family == "phi3" and Version(transformers.__version__) < Version("5.20")
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, use_cache=not loses_its_cache)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW}
    with generating(model, PROMPT + NEW):
        said = model.generate(prompt, **options)
        if loses_its_cache:
            message = rf"token at position {ORIGINAL} .* is missing; .* generate with use_cache=False"
            with pytest.raises(RopewalkError, match=message):
                model.generate(prompt, **options, use_cache=True)
    new = said[0, PROMPT:].tolist()
    assert decoding.greedy_ids(model, [ids], NEW, PROMPT + NEW, frozenset()) == [new]
    assert full_logits(model, said[0].tolist())[PROMPT - 1 : -1].argmax(-1).tolist() == new
    assert len(set(new)) > 2


@pytest.mark.parametrize("total", [ORIGINAL, ORIGINAL + NEW])
def test_start_tokens_keep_their_angles_in_chunks_in_steps_and_behind_padding(
    folders: dict[str, Path], total: int
) -> None:
    """Against angles computed by hand in float64, one by one."""
    rope = factors(8, start_tokens=6)
    model = loaded(folders, rope)
    by_hand = ByHand(rope, total)
    ids = token_ids(total)
    with rotated_by(model, by_hand):
        expected = full_logits(model, ids)
    with generating(model, total):
        # float64 angles: what is left is the rounding of cos and sin to float32.
        allowed = rounding_allows(model, lambda: full_logits(model, ids), 0.0, total)
        for chunk in (4, 7, total - 5):
            steps = step_by_step(model, ids, total - 5, chunk)
            assert float((steps - expected).abs().max()) < allowed < 1e-4
    with rotated_by(model, ByHand(factors(8, start_tokens=0), total)):
        assert float((full_logits(model, ids) - expected).abs().max()) > 0.1
    rows = [ids[: total - NEW], ids[5:11], ids[:3]]
    found = decoding.greedy_ids(model, rows, 6, total, frozenset(), chunk=9)
    with rotated_by(model, by_hand):
        for row, new in zip(rows, found, strict=True):
            chain = full_logits(model, [*row, *new])[len(row) - 1 : -1]
            assert chain.argmax(-1).tolist() == new


@pytest.mark.parametrize("start_tokens", [0, 6])
@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + NEW])
def test_losses_in_chunks_are_those_of_one_pass(
    folders: dict[str, Path], start_tokens: int, length: int
) -> None:
    rope = factors(8, start_tokens=start_tokens)
    model = loaded(folders, rope)
    ids = torch.tensor([token_ids(length)])
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        head = OutputHead.of(model)
        whole = causal_losses(model, head, ids, labels)
        for chunk in (4, 17):
            assert same(causal_losses(model, head, ids, labels, chunk), whole)
        with rotated_by(model, ByHand(rope, length)):
            by_hand = causal_losses(model, head, ids, labels)
        allowed = rounding_allows(model, lambda: causal_losses(model, head, ids, labels), 0.0, length)
    assert float((whole - by_hand).abs().max()) < allowed < 1e-4


def test_a_length_that_cannot_be_fixed_is_refused(folders: dict[str, Path]) -> None:
    model = loaded(folders, factors(8))
    with (
        pytest.raises(RopewalkError, match=r"total_length must be at least 1 token, got 0"),
        generating(model, 0),
    ):
        pass
    plain = load_model(
        folders["llama"], ModelSetup(rope=factors(8), exact_rope=False, max_position_embeddings=TARGET)
    )
    with (
        pytest.raises(
            RopewalkError,
            match=r"cannot fix the sequence length for the longrope RoPE .* load the model with exact_rope=True",
        ),
        generating(plain, 100),
    ):
        pass
    with generating(load_model(folders["llama"], ModelSetup(exact_rope=False)), 100):
        pass
