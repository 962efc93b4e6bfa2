"""Configs of published checkpoints: the files in ``configs/`` and what is right to read from each.

The files hold the publisher's own values in the publisher's spelling, without the keys that say nothing of
position or shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.rope import Default, DynamicNtk, Linear, Llama3, LongRope, RopeMethod, Yarn
from tests.places import CONFIGS


@dataclass(frozen=True)
class CheckpointCase:
    """What a file says.

    Attributes:
        methods: by layer type.
        trained_length: tokens that the model read before its positions were scaled, as far as the file tells.
        config_class: transformers' class for the decoder.
        defaults: what the file leaves out and that class supplies.
        warning: part of the one sentence that is to be said of it, if any.
        documented: part of the sentence on lengths that its publisher documents, if it is to be said.
    """

    methods: dict[str | None, RopeMethod]
    trained_length: int
    config_class: str | None = "LlamaConfig"
    defaults: dict[str, Any] = field(default_factory=dict)
    warning: str | None = None
    documented: str | None = None

    @property
    def length_dependent(self) -> bool:
        return any(method.length_dependent for method in self.methods.values())


def path_of(name: str) -> Path:
    """The file of a case."""
    return CONFIGS / f"{name}.json"


def one(method: RopeMethod, trained_length: int, *args: Any, **more: Any) -> CheckpointCase:
    return CheckpointCase({None: method}, trained_length, *args, **more)


def phi(name: str) -> CheckpointCase:
    """All of them rotate 96 dimensions and go from 4096 to 131072 tokens: sqrt(1 + ln 32 / ln 4096)."""
    lists = json.loads(path_of(name).read_text())["rope_scaling"]
    factors = tuple(lists["short_factor"]), tuple(lists["long_factor"])
    return one(LongRope(96, 10000.0, *factors, 1.1902380714238083, 4096), 4096, "Phi3Config")


LLAMA_2_THETA = {"rope_theta": 10000.0}
"""Llama 2 came before the key."""

CASES = {
    "llama-2-7b": one(Default(128, 10000.0), 4096, defaults=LLAMA_2_THETA),
    "llama-2-7b-32k": one(
        Linear(128, 10000.0, 8.0),
        4096,
        defaults=LLAMA_2_THETA,
        warning="linear factor 8: the config does not say whether",
    ),
    "yarn-llama-2-7b-128k": one(Yarn(128, 10000.0, 32.0, 4096), 4096, defaults=LLAMA_2_THETA),
    "yarn-llama-2-13b-64k": one(Yarn(128, 10000.0, 16.0, 4096), 4096, defaults=LLAMA_2_THETA),
    "codellama-7b": one(Default(128, 1000000), 16384),
    "llama-3-8b": one(Default(128, 500000.0), 8192),
    "llama-3-8b-instruct-262k": one(Default(128, 283461213.0), 262144),
    "llama-3-8b-instruct-1048k": one(Default(128, 3580165449.0), 1048576),
    "llama-3.1-8b": one(Llama3(128, 500000.0, 8.0, 1.0, 4.0, 8192), 8192),
    "llama-3.2-1b": one(Llama3(64, 500000.0, 32.0, 1.0, 4.0, 8192), 8192),
    "mistral-7b-v0.1": one(
        Default(128, 10000.0),
        32768,
        "MistralConfig",
        warning="only the last 4096 tokens (sliding_window)",
        documented="is trained for 8192 tokens (arXiv:2310.06825, table 1)",
    ),
    "mistral-7b-v0.2": one(Default(128, 1000000.0), 32768, "MistralConfig"),
    "mistral-7b-v0.3": one(Default(128, 1000000.0), 32768, "MistralConfig"),
    "qwen2.5-7b-instruct": one(Default(128, 1000000.0), 32768, "Qwen2Config"),
    # The edit that the model card documents leaves max_position_embeddings as it is.
    "qwen2.5-7b-instruct-yarn": one(
        Yarn(128, 1000000.0, 4.0, 32768),
        32768,
        "Qwen2Config",
        warning="32768 is 131072 tokens, but max_position_embeddings is 32768",
        documented="its publisher serves 131072 with this yarn, without training",
    ),
    "qwen1.5-7b": one(Default(128, 1000000.0), 32768, "Qwen2Config"),
    "deepseek-coder-6.7b-base": one(
        Linear(128, 100000, 4.0), 4096, warning="linear factor 4: the config does not say whether"
    ),
    "qwen2.5-coder-7b": one(Default(128, 1000000.0), 32768, "Qwen2Config"),
    "qwen2.5-7b-instruct-1m": one(
        Default(128, 1e7),
        262144,
        "Qwen2Config",
        warning="an original length of 262144 tokens, and max_position_embeddings is 1010000",
    ),
    "granite-3.1-2b": one(Default(64, 5e6), 131072, "GraniteConfig"),
    "command-r7b": one(Default(128, 50000), 132096, "Cohere2Config"),
    "qwen3-next-80b-a3b": one(Default(64, 1e7), 262144, "Qwen3NextConfig"),
    "gpt-oss-20b": one(
        Yarn(64, 150000, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False), 4096, "GptOssConfig"
    ),
    "olmo-3-7b": CheckpointCase(
        {
            "full_attention": Yarn(
                128, 500000, 8.0, 8192, attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1
            ),
            "sliding_attention": Default(128, 500000),
        },
        8192,
        "Olmo3Config",
    ),
    "qwen3-8b": one(
        Default(128, 1000000),
        40960,
        "Qwen3Config",
        documented="trained for 32768 tokens (model card of Qwen/Qwen3-8B)",
    ),
    # The first upload said su for longrope and had other factors.
    "phi-3-mini-128k-instruct-april-2024": phi("phi-3-mini-128k-instruct-april-2024"),
    "phi-3-mini-128k-instruct": phi("phi-3-mini-128k-instruct"),
    "phi-3.5-mini-instruct": phi("phi-3.5-mini-instruct"),
    "phi-4-mini-instruct": phi("phi-4-mini-instruct"),
    "phi-2": one(Default(32, 10000.0), 2048, "PhiConfig"),
    "gemma-2-9b": one(Default(256, 10000.0), 8192, "Gemma2Config"),
    "gemma-3-1b": CheckpointCase(
        {"full_attention": Default(256, 1000000), "sliding_attention": Default(256, 10000)},
        32768,
        "Gemma3TextConfig",
    ),
    "gemma-3-4b": CheckpointCase(
        {"full_attention": Linear(256, 1000000.0, 8.0), "sliding_attention": Default(256, 10000.0)},
        16384,
        "Gemma3TextConfig",
        {
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "head_dim": 256,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        "full_attention: linear factor 8: the config does not say whether",
    ),
    "starcoder2-7b": one(
        Default(128, 1000000), 16384, "Starcoder2Config", warning="only the last 4096 tokens (sliding_window)"
    ),
    "pythia-70m": one(Default(16, 10000), 2048, "GPTNeoXConfig"),
    "glm-4-9b-0414": one(Default(64, 10000.0), 32768, "Glm4Config"),
    "smollm3-3b": one(Default(128, 5000000.0), 65536, "SmolLM3Config"),
    "olmo-2-7b": one(Default(128, 500000), 4096, "Olmo2Config"),
    # transformers does not have this family, whose code is in the checkpoint: the file stands alone.
    "internlm2.5-7b": one(
        DynamicNtk(128, 1000000, 2.0, 32768), 32768, None, warning="dynamic is for inference only"
    ),
}
