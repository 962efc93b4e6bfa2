"""What tests of longrope in a running model share: models that hear their factors, and what rounding may do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import LongRope, RotaryEmbedding

ORIGINAL, TARGET = 48, 192
VOCABULARY = 97

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 16, "partial_rotary_factor": 0.5}),
}


def tiny(family: str = "llama", **more: Any) -> Any:
    """A random model whose attention depends on positions: usual initial weights are too small for that."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": ORIGINAL,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **extra,
            **more,
        }
    )
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def factors(rotary_dim: int, attention_factor: float = 1.2, start_tokens: int = 0, seed: int = 0) -> LongRope:
    """Random factors that ascend, the long ones far from the short ones."""
    drawn = torch.Generator().manual_seed(seed)
    pairs = rotary_dim // 2
    short = (1 + torch.rand(pairs, generator=drawn) * 0.4).sort().values.tolist()
    long = (1 + torch.rand(pairs, generator=drawn) * 4).sort().values.tolist()
    return LongRope(rotary_dim, 1e4, tuple(short), tuple(long), attention_factor, ORIGINAL, start_tokens)


def token_ids(length: int, seed: int = 1, vocabulary: int = VOCABULARY) -> list[int]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (length,), generator=drawn).tolist()


def full_logits(model: Any, ids: list[int]) -> Tensor:
    """``[length, vocabulary]`` of one forward pass without a cache."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


class ByHand(torch.nn.Module):
    """cos and sin by the paper's formulas in float64, angle by angle, for a length that is fixed."""

    def __init__(self, rope: LongRope, total_length: int) -> None:
        super().__init__()
        self.rope, self.total_length = rope, total_length

    def angle(self, position: int, pair: int) -> float:
        theta = self.rope.rope_theta ** (-2 * pair / self.rope.rotary_dim)
        beyond = self.total_length > self.rope.original_max_position_embeddings
        scale = (self.rope.long_factor if beyond else self.rope.short_factor)[pair]
        return position * (theta if position < self.rope.start_tokens else theta / scale)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        pairs = range(self.rope.rotary_dim // 2)
        angles = torch.tensor(
            [
                [[self.angle(p, pair) for pair in (*pairs, *pairs)] for p in row]
                for row in position_ids.tolist()
            ],
            dtype=torch.float64,
        )
        return angles.cos() * self.rope.attention_factor, angles.sin() * self.rope.attention_factor


@contextmanager
def rotated_by(model: Any, other: torch.nn.Module) -> Iterator[None]:
    """Put another rotary module into a model while the context is open."""
    parent, attribute, own = rotary_module(model)
    setattr(parent, attribute, other)
    try:
        yield
    finally:
        setattr(parent, attribute, own)


class Shaken(torch.nn.Module):
    """A rotary module whose angles and whose cos and sin are off, up or down at random."""

    def __init__(
        self, rotary: RotaryEmbedding, relative_angle: float, rounding: float, length: int, seed: int
    ) -> None:
        super().__init__()
        self.inv_freq = rotary.frequencies(total_length=length).inv_freq
        self.rotary, self.relative_angle, self.rounding = rotary, relative_angle, rounding
        self.drawn = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (part.double() for part in self.rotary(x, position_ids))
        angles = torch.cat([position_ids[..., None] * self.inv_freq] * 2, dim=-1)
        turn = self.noise(cos) * self.relative_angle * angles
        rounded = [part * (1 + self.noise(part) * self.rounding) for part in (cos, sin)]
        cos, sin = rounded
        return cos * turn.cos() - sin * turn.sin(), sin * turn.cos() + cos * turn.sin()

    def noise(self, like: Tensor) -> Tensor:
        half = torch.randint(0, 2, (*like.shape[:-1], like.shape[-1] // 2), generator=self.drawn)
        return torch.cat((half, half), dim=-1).double() * 2 - 1


def rounding_allows(
    model: Any, logits: Callable[[], Tensor], relative_angle: float, length: int, rounding: float = 2**-24
) -> float:
    """How far logits may be off: what the largest errors, of random signs, make of them; the worst of four draws.

    Rounding errs less: most numbers by less than that, and the angles of one pair alike.

    Args:
        model: in float64, so that nothing else rounds.
        logits: what to compare.
        relative_angle: largest relative error of an angle.
        length: that the factors are for.
        rounding: largest relative error of cos and sin.
    """
    exact, own = logits(), rotary_module(model)[2]
    worst = 0.0
    for seed in range(4):
        with rotated_by(model, Shaken(own, relative_angle, rounding, length, seed)):
            worst = max(worst, float((logits() - exact).abs().max()))
    return worst
