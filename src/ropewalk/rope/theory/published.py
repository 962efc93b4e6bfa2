""""""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ropewalk.errors import RopewalkError

LOWER_BOUNDS_DIM = 128
"""rotary_dim of the published table."""

LOWER_BOUNDS: Mapping[int, float] = MappingProxyType(
    {
        1024: 4.3e3,
        2048: 1.6e4,
        4096: 2.7e4,
        8192: 8.4e4,
        16384: 3.1e5,
        32768: 6.4e5,
        65536: 2.1e6,
        131072: 7.8e6,
        262144: 3.6e7,
        524288: 6.4e7,
        1048576: 5.1e8,
    }
)
"""Base by context length in tokens. Source: Men et al., arXiv:2405.14591, table 2."""


@dataclass(frozen=True)
class Extension:
    """One step in which a published model was trained for a longer context with a new base.

    Attributes:
        model: name of the model.
        rotary_dim: rotated dimensions of a head.
        trained_length, rope_theta: tokens and base before the step.
        target_length, new_theta: tokens and base of the step's training.
        source: source of the numbers.
    """

    model: str
    rotary_dim: int
    trained_length: int
    rope_theta: float
    target_length: int
    new_theta: float
    source: str


_ANCHOR = "AnchorContext", 128, 4096, 1e4
_ANCHOR_SOURCE = "arXiv:2411.13476"
_LWM, _LWM_SOURCE = "LWM", "arXiv:2402.08268"
_GRADIENT = "Gradient Llama 3 8B"
_GRADIENT_SOURCE = "model card of gradientai/Llama-3-8B-Instruct-Gradient-4194k"
_GRANITE = "model cards and config.json of ibm-granite/granite-3.0 and 3.1"

EXTENSIONS: tuple[Extension, ...] = (
    Extension("Code Llama", 128, 4096, 1e4, 16384, 1e6, "arXiv:2308.12950, section 2.4"),
    Extension("Llama 2 Long 7B", 128, 4096, 1e4, 32768, 5e5, "arXiv:2309.16039, section 2.1"),
    Extension(*_ANCHOR, 16384, 1e6, _ANCHOR_SOURCE),
    Extension(*_ANCHOR, 32768, 1e6, _ANCHOR_SOURCE),
    Extension(*_ANCHOR, 65536, 5e6, _ANCHOR_SOURCE),
    Extension(*_ANCHOR, 131072, 1e7, _ANCHOR_SOURCE),
    Extension(*_ANCHOR, 262144, 5e7, _ANCHOR_SOURCE),
    Extension(_LWM, 128, 4096, 1e4, 32768, 1e6, _LWM_SOURCE),
    Extension(_LWM, 128, 32768, 1e6, 131072, 1e7, _LWM_SOURCE),
    Extension(_LWM, 128, 131072, 1e7, 262144, 1e7, _LWM_SOURCE),
    Extension(_LWM, 128, 262144, 1e7, 524288, 2.5e7, _LWM_SOURCE),
    Extension(_LWM, 128, 524288, 2.5e7, 1048576, 5e7, _LWM_SOURCE),
    Extension("Llama 2 7B, Fu et al.", 128, 4096, 1e4, 81920, 5e6, "arXiv:2402.10171"),
    Extension("Qwen2 7B", 128, 4096, 1e4, 32768, 1e6, "arXiv:2407.10671, section 3.2"),
    Extension("Qwen2 0.5B", 64, 4096, 1e4, 32768, 1e6, "arXiv:2407.10671, section 3.2"),
    Extension("Qwen2.5-1M", 128, 32768, 1e6, 65536, 1e6, "arXiv:2501.15383, section 3"),
    Extension("Qwen2.5-1M", 128, 65536, 1e6, 131072, 5e6, "arXiv:2501.15383, section 3"),
    Extension("Qwen2.5-1M", 128, 131072, 5e6, 262144, 1e7, "arXiv:2501.15383, section 3"),
    Extension("Mistral 7B v0.2", 128, 8192, 1e4, 32768, 1e6, "arXiv:2310.06825 and config.json of v0.2"),
    Extension("MegaBeam Mistral 7B", 128, 32768, 1e6, 300_000, 2.5e7, "arXiv:2505.08651"),
    Extension("MegaBeam Mistral 7B", 128, 300_000, 2.5e7, 600_000, 7.5e7, "arXiv:2505.08651"),
    Extension(_GRADIENT, 128, 8192, 5e5, 65536, 15.3e6, _GRADIENT_SOURCE),
    Extension(_GRADIENT, 128, 65536, 15.3e6, 262144, 207.1e6, _GRADIENT_SOURCE),
    Extension(_GRADIENT, 128, 262144, 207.1e6, 524288, 1.06e9, _GRADIENT_SOURCE),
    Extension(_GRADIENT, 128, 524288, 1.06e9, 1048576, 2.8e9, _GRADIENT_SOURCE),
    Extension("ProLong 8B", 128, 8192, 5e5, 65536, 8e6, "arXiv:2410.02660, training scripts"),
    Extension("ProLong 8B", 128, 65536, 8e6, 524288, 1.28e8, "arXiv:2410.02660, training scripts"),
    Extension("ChatQA 2 70B", 128, 8192, 5e5, 131072, 1.5e8, "arXiv:2407.14482"),
    Extension("Llama 3 8B 80K QLoRA", 128, 8192, 5e5, 81920, 2e8, "arXiv:2404.19553"),
    Extension("SmolLM3 3B", 128, 4096, 5e4, 32768, 1.5e6, "Hugging Face, SmolLM3 (2025)"),
    Extension("SmolLM3 3B", 128, 32768, 1.5e6, 65536, 5e6, "Hugging Face, SmolLM3 (2025)"),
    Extension("SmolLM2 1.7B", 64, 2048, 1e4, 8192, 1.3e5, "arXiv:2502.02737 and config.json"),
    Extension("Granite 3.1 8B", 128, 4096, 1e4, 131072, 5e6, _GRANITE),
    Extension("Granite 3.1 2B", 64, 4096, 1e4, 131072, 5e6, _GRANITE),
    Extension("Granite 3B Code", 80, 2048, 1e4, 128_000, 1e7, "arXiv:2407.13739 and config.json"),
)
"""Published extensions by a new base, one entry for each step. Models with partial rotation are left out."""

NEAR = 2**0.5
"""Largest ratio of two lengths that count as about the same."""


def published_near(length: int) -> tuple[Extension, ...]:
    """The extensions to about this length, sorted by base."""
    near = [each for each in EXTENSIONS if length / NEAR < each.target_length <= length * NEAR]
    return tuple(sorted(near, key=lambda each: each.new_theta))


@dataclass(frozen=True)
class Schedule:
    """One published curriculum.

    Attributes:
        name: name in rules and reports.
        bases: rope_theta by context length in tokens, increasing.
        start: the model that it started from, for which the bases were chosen: its base and its trained length.
        source: source of the numbers.
    """

    name: str
    bases: Mapping[int, float]
    start: str
    source: str

    def theta(self, target_length: int) -> float:
        """The base of the shortest published context of at least ``target_length`` tokens.

        Raises:
            RopewalkError: if the schedule does not reach that length.
        """
        for length, base in self.bases.items():
            if length >= target_length:
                return base
        longest = max(self.bases)
        raise RopewalkError(
            f"the rule schedule:{self.name} gives bases for up to {longest} tokens, but the target length is "
            f"{target_length}; choose the rule critical-dimension"
        )


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule(
                "gradient",
                MappingProxyType(
                    {65536: 15.3e6, 262144: 207.1e6, 524288: 1.06e9, 1048576: 2.8e9, 4194304: 45.2e9}
                ),
                "Llama 3 8B, base 500000, 8192 tokens",
                "model card of gradientai/Llama-3-8B-Instruct-Gradient-4194k (2024)",
            ),
            Schedule(
                "lwm",
                MappingProxyType({32768: 1e6, 131072: 1e7, 262144: 1e7, 524288: 2.5e7, 1048576: 5e7}),
                "Llama 2 7B, base 10000, 4096 tokens",
                "Liu et al., arXiv:2402.08268",
            ),
            Schedule(
                "anchorcontext",
                MappingProxyType({16384: 1e6, 32768: 1e6, 65536: 5e6, 131072: 1e7, 262144: 5e7}),
                "Llama 2 7B, base 10000, 4096 tokens",
                "Wang et al., arXiv:2411.13476",
            ),
        )
    }
)
"""The published schedules by name. All started from models with rotary_dim 128."""

LARGEST_PUBLISHED = max(
    *(each.new_theta for each in EXTENSIONS),
    *(base for schedule in SCHEDULES.values() for base in schedule.bases.values()),
)
"""The largest base published for a longer context: Gradient's for 4M tokens."""
