"""Settings of ``ropewalk plan``: the GPUs to plan for, and what is assumed of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from ropewalk.io.settings import COMMON, Length, Settings
from ropewalk.planning.sizing.time import GPUS, Cluster

Gpu = Literal["h100", "h200", "a100", "b200"]


class HardwareSettings(Settings):
    """GPUs to plan a run for, and the shares of their peaks that computation is assumed to reach."""

    gpus: Annotated[int | None, COMMON] = Field(
        None,
        ge=1,
        description="Number of GPUs. Default: the number of processes that the recipe's key parallel asks for, or 8 if "
        "the recipe leaves this number open.",
    )
    gpu: Annotated[Gpu, COMMON] = Field(
        "h100", description="GPU model, whose memory and speed are taken from its data sheet."
    )
    gpus_per_node: int = Field(8, ge=1, description="Number of GPUs in each machine, connected by NVLink.")
    memory_gb: Annotated[float | None, COMMON] = Field(
        None,
        gt=0,
        description="Memory of each GPU in GB (10^9 bytes). Default: the memory in its data sheet.",
    )
    document_length: Annotated[Length | None, COMMON] = Field(
        None,
        description="Length in tokens to assume for every document: 32k. Default: the lengths of the recipe's own "
        "documents if they and the tokenizer are on this machine, otherwise the length of a training sequence.",
    )
    price: Annotated[float | None, COMMON] = Field(
        None, gt=0, description="Price of one GPU for one hour, in any currency. Default: show no cost."
    )
    matmul_efficiency: float = Field(
        0.55,
        gt=0,
        le=1,
        description="Share of the GPU's peak FLOP/s that matrix products outside attention reach, up to 1. The default "
        "is a guess.",
    )
    attention_efficiency: float = Field(
        0.35,
        gt=0,
        le=1,
        description="Share of the GPU's peak FLOP/s that attention reaches, up to 1. The default is about the share of "
        "FlashAttention-2 on an H100.",
    )

    @property
    def cluster(self) -> Cluster:
        """The assumed hardware."""
        known = GPUS[self.gpu]
        return replace(
            known,
            ranks_per_node=self.gpus_per_node,
            bytes_per_rank=known.bytes_per_rank if self.memory_gb is None else int(self.memory_gb * 1e9),
            matmul_efficiency=self.matmul_efficiency,
            attention_efficiency=self.attention_efficiency,
        )
