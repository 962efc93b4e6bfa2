"""Bases that published long-context models were trained with, by context length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ropewalk.errors import RopewalkError


@dataclass(frozen=True)
class Schedule:
    """One published curriculum.

    Attributes:
        name: how rules and reports call it.
        bases: rope_theta by context length in tokens, rising.
        start: which model it began from: its base and its trained length. The bases were chosen for that one.
        source: where the numbers stand.
    """

    name: str
    bases: Mapping[int, float]
    start: str
    source: str

    def theta(self, target_length: int) -> float:
        """The base of the shortest published context that holds ``target_length`` tokens.

        Raises:
            RopewalkError: if the schedule does not go that far.
        """
        for length, base in self.bases.items():
            if length >= target_length:
                return base
        longest = max(self.bases)
        raise RopewalkError(
            f"the schedule {self.name} ends at {longest} tokens, before {target_length}; choose the rule "
            "critical-dimension"
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
"""The published schedules by name. All began from models with rotary_dim 128."""
