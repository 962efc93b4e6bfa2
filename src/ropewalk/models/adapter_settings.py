"""Settings of an adapter: small matrices that are trained in place of a model's own weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ropewalk.io.settings import TEXT, Count, Settings, written

ATTENTION, ALL_LINEAR = "attention", "all-linear"
"""Groups of linear layers that a recipe may name instead of the names of layers."""

AlsoTrained = Literal["embeddings", "norms"]


class AdapterSettings(Settings):
    """LoRA: each chosen linear layer gets two small matrices, and only they are trained (arXiv:2106.09685).

    A plain string in a recipe is the method, and a plain string in place of a list its only entry.
    """

    method: Literal["lora"] = Field(default="lora", description="kind of adapter")
    rank: Count = Field(
        default=16, ge=1, description="rank of the two matrices that LoRA adds to a linear layer"
    )
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="scale of the adapter: its output is multiplied by alpha / rank (see `rslora`)",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="dropout of the adapter's input in training; must be 0 with several processes",
    )
    targets: list[str] = Field(
        default=[ATTENTION],
        description="linear layers that get an adapter: `attention` (all in the attention modules), `all-linear` (all "
        "except the output head and `out_proj` of Mamba-2 layers), or names such as `q_proj`",
    )
    also_train: list[AlsoTrained] = Field(
        default=["embeddings", "norms"],
        description="other weights to train in full: `embeddings`, `norms`. LongLoRA (arXiv:2309.12307) found both "
        "essential for long contexts",
    )
    rslora: bool = Field(
        default=False,
        description="multiply the adapter's output by alpha / sqrt(rank) instead of alpha / rank (arXiv:2312.03732)",
    )

    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="nf4: keep frozen linear layers in 4 bits in training (QLoRA, arXiv:2305.14314); needs the package "
        "bitsandbytes, one process on CUDA, and precision bfloat16",
    )

    @model_validator(mode="before")
    @classmethod
    @written({"const": "lora"})
    def _from_name(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value

    @field_validator("targets", "also_train", mode="before")
    @classmethod
    @written(TEXT)
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("targets")
    @classmethod
    def _some(cls, names: list[str]) -> list[str]:
        if not names:
            raise ValueError(
                f"must be {ATTENTION!r}, {ALL_LINEAR!r} or a list of names of linear layers, got an empty list"
            )
        return names

    @field_validator("targets", "also_train")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{repeated[0]!r} is listed twice; list it once")
        return names
