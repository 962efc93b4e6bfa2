"""Settings of ``ropewalk plan`` and ``ropewalk init``: the GPUs to plan for, and what is assumed of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ropewalk.io.settings import (
    COMMON,
    DOCUMENTS,
    MODEL_NAME,
    TARGET_LENGTH,
    TEXT,
    FilePath,
    Length,
    Option,
    Settings,
    written,
)
from ropewalk.planning.settings import RULE
from ropewalk.planning.sizing.time import GPUS, H100, Cluster

GpuName = Literal["h100", "h200", "a100", "b200", "b300", "mi300x", "4090", "5090", "l40s", "a6000"]

_NEEDLESS = re.compile(r"nvidia|geforce|tesla|amd|instinct|rtx|sxm\d?|hbm\d?e?|[^a-z0-9]")
"""Parts of a GPU's name that :data:`GpuName` does without."""


@written(TEXT)
def _gpu(value: Any) -> Any:
    """The name of a GPU as :data:`GpuName` has it, from usual spellings: ``RTX 4090``, ``H100-80GB``."""
    if not isinstance(value, str):
        return value
    size = re.search(r"\b(\d+) ?gb\b", value.lower())
    name = _NEEDLESS.sub("", value.lower().replace(size[0], "") if size else value.lower())
    if name not in GPUS:
        raise ValueError(
            f"unknown GPU {value!r}; choose from {', '.join(GPUS)}, or for another one give the nearest with its "
            "memory (memory_gb) and speed (tflops)"
        )
    usual = GPUS[name].bytes_per_rank // 10**9
    if size and int(size[1]) != usual:
        raise ValueError(f"{value!r} is planned with {usual} GB; give {name}, and memory_gb {size[1]}")
    return name


Gpu = Annotated[GpuName, BeforeValidator(_gpu), Option(metavar="GPU")]
"""A GPU of :data:`~ropewalk.planning.sizing.time.GPUS`, in any of its usual spellings."""


class HardwareSettings(Settings):
    """GPUs to plan a run for, and the shares of their peaks that computation is assumed to reach."""

    gpus: Annotated[int | None, COMMON] = Field(
        default=None,
        ge=1,
        description="Number of GPUs. Default: the product of the recipe's degrees of parallelism, or 8 if the recipe "
        "sets none.",
    )
    gpu: Annotated[Gpu, COMMON] = Field(
        default="h100",
        description=f"GPU model: {', '.join(GPUS)}; case, spaces and dashes do not matter. Memory and speed are those "
        "in its data sheet (for NVIDIA's data centers of the SXM version; 80 GB for h100 and a100). For another one, "
        "give the nearest and --memory-gb and --tflops.",
    )
    gpus_per_node: int = Field(
        default=8,
        ge=1,
        description="Number of GPUs per machine, assumed to be connected by NVLink, or by PCI Express "
        "where there is none (4090, 5090, l40s, a6000).",
    )
    memory_gb: Annotated[float | None, COMMON] = Field(
        default=None,
        gt=0,
        description="Memory of each GPU in GB (10^9 bytes). Default: the memory in its data sheet.",
    )
    tflops: Annotated[float | None, COMMON] = Field(
        default=None,
        gt=0,
        description="Peak speed of each GPU in dense bfloat16 products, in TFLOP/s. Default: that in its data sheet.",
    )
    host_memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory of each machine's CPUs in GB (10^9 bytes), for what is offloaded and for copies of "
        "checkpoints. Default: 2,000, as a DGX system has, or 512 for cards without NVLink.",
    )
    document_length: Annotated[Length | None, COMMON] = Field(
        default=None,
        description="Length in tokens to assume for every document, such as 32k. Default: the lengths of the recipe's "
        "documents if they and the tokenizer are on this machine, otherwise the length of a training sequence.",
    )
    price: Annotated[float | None, COMMON] = Field(
        default=None,
        gt=0,
        description="Price of one GPU for one hour, in any currency. Default: show no cost.",
    )
    matmul_efficiency: float = Field(
        default=H100.matmul_efficiency,
        gt=0,
        le=1,
        description="Share (0 to 1) of the GPU's peak FLOP/s reached by matrix products, except those in attention. "
        "The default was measured on an H200.",
    )
    attention_efficiency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share (0 to 1) of the GPU's peak FLOP/s that attention reaches. Default: that of the kernel that "
        "the run uses, such as 0.33 for FlashAttention 2 on an H100.",
    )
    memory_efficiency: float = Field(
        default=H100.memory_efficiency,
        gt=0,
        le=1,
        description="Share (0 to 1) of the GPU's memory bandwidth reached by operators without matrix products. The "
        "default was fitted to training steps on an H200.",
    )
    measured: FilePath | None = Field(
        default=None,
        description="Output folder of a run of the same model on the same kind of GPU, by `ropewalk extend`. The time "
        "of computation is multiplied by the time that the steps of this run took, divided by the planned time of "
        "its own recipe. Default: no factor.",
    )

    @property
    def cluster(self) -> Cluster:
        """The assumed hardware."""
        known = GPUS[self.gpu]
        return replace(
            known,
            ranks_per_node=self.gpus_per_node,
            bytes_per_rank=known.bytes_per_rank if self.memory_gb is None else int(self.memory_gb * 1e9),
            host_bytes=known.host_bytes if self.host_memory_gb is None else int(self.host_memory_gb * 1e9),
            peak_flops=known.peak_flops if self.tflops is None else self.tflops * 1e12,
            matmul_efficiency=self.matmul_efficiency,
            attention_efficiency=self.attention_efficiency,
            memory_efficiency=self.memory_efficiency,
        )


class TrainingMachine(Settings):
    """The machine that trains; this one, if nothing is given."""

    gpus: Annotated[int | None, Option(group="The machine that trains")] = Field(
        default=None,
        ge=1,
        description="Number of its GPUs. Default: 8 with --gpu or --memory-gb, otherwise those of this machine.",
    )
    gpu: Annotated[Gpu | None, Option(group="The machine that trains")] = Field(
        default=None,
        description=f"Its GPU model: {', '.join(GPUS)}. Default: h100 with --gpus or --memory-gb, otherwise that of "
        "this machine.",
    )
    memory_gb: Annotated[float | None, Option(group="The machine that trains")] = Field(
        default=None,
        gt=0,
        description="Memory of each GPU in GB (10^9 bytes). Default: the memory in its data sheet.",
    )

    @property
    def hardware(self) -> HardwareSettings | None:
        """The GPUs that are named; None for those of this machine."""
        named = {"gpus": self.gpus, "gpu": self.gpu, "memory_gb": self.memory_gb}
        given = {key: value for key, value in named.items() if value is not None}
        if not given:
            return None
        found = HardwareSettings(**given)
        return found if self.gpus else found.model_copy(update={"gpus": found.gpus_per_node})


class InitSettings(TrainingMachine):
    """Settings of ``ropewalk init``."""

    model: Annotated[str, Option(argument=True)] = Field(description=f"{MODEL_NAME}.")
    documents: Annotated[tuple[str, ...], Option(metavar="PATH", repeated=True, group=COMMON.group)] = Field(
        default=(),
        description=f"Documents to train on: {DOCUMENTS}. Default: a place in the recipe that says what is missing.",
    )
    target: Annotated[Length, COMMON] = Field(description=TARGET_LENGTH)
    out: Annotated[FilePath, COMMON] = Field(
        default=Path("recipe.yaml"), description="File to write the recipe to. It must not exist yet."
    )
    text_field: str | None = Field(
        default=None,
        description="Record field that holds the text. Default: text if the records have it, otherwise content, "
        "document, body or raw_content if they have only one of these.",
    )
    rule: str | None = Field(default=None, description=RULE)
    dry_run: Annotated[bool, Option(group="The machine that trains")] = Field(
        default=True,
        description="Run a step of each stage without data or GPU, and set checkpointing and offloading to what fits "
        "the machine that trains. This takes a minute or so for a model of billions of parameters.",
    )
