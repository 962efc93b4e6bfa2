"""What ropewalk does with a tiny random model of every causal family of transformers: the work behind families.json.

``scripts/supported_models.py`` runs :func:`support_of` on each family; the tests run it on a few.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ropewalk import PackedLayout
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.compute.routing import routers_of
from ropewalk.models.config.auto_class import auto_class, is_part, name_of_class
from ropewalk.models.config.file import config_from_json
from ropewalk.models.config.layers import layer_values
from ropewalk.models.config.model import NO_DECODERS, ModelConfig, decoder_key
from ropewalk.models.config.write import with_rope
from ropewalk.models.load import ModelSetup, attach, load_model
from ropewalk.models.support import COLUMNS, loading_refusal
from ropewalk.parallel import MeshShape, ShardedLayouts, make_mesh
from ropewalk.rope import Default, RopeMethod
from ropewalk.testing import Ranks
from ropewalk.training.preflight import refuse_on_mesh
from tests.models.attention.test_hooks import LENGTHS, documents_alone
from tests.models.attention.test_recurrent import apart_from_the_anchor
from tests.training.family_cases import BALANCING, rows_with_padding, two_steps, two_steps_on_ranks
from tests.versions import missing

WINDOW = 7
"""Tokens of windows and chunks: shorter than the documents."""
ROUNDING = 1024 * 2.0**-23
"""Of the largest logit or gradient: norms and rotary angles of transformers are float32 in a float64 model."""
EXACT = 2.0**-12
"""The same for float32 models whose angles are rounded to float32 and not."""
STEPS = 2.0**-36
"""Relative, of losses and gradient norms, and absolute, of weights near 1: float64's rounding, 2**-53, grows by no more
than 2**17 in two steps; whatever one side alone rounds to float32, or computes otherwise, is off by 2**-24 at least."""
NOTICED = 1e-3
"""Of the largest logit: how far off a row must be whose documents see each other, or the comparison says nothing."""
SECONDS = 60
"""For everything that is done with one family in one process."""
MOST_PARAMETERS = 30_000_000

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    # Windows and chunks
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    # Experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    # Latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # Sparse attention
    # So many that their scores, sums of relu, are not 0 for several tokens at once.
    "index_n_heads": 32,
    "index_head_dim": 8,
    "index_topk": 8,
    # Layers with a state
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
    "attention_window_size": WINDOW,
    "num_mem_blocks": 1,
    # Encoders of images and sounds
    "image_size": 16,
    "patch_size": 8,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
    # Other names of the same
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 4,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 4,
    "n_inner": 48,
    "n_positions": 256,
    "rotary_dim": 8,
    "ffn_hidden_size": 48,
    "ffn_dim": 48,
    "conv_dim": 32,
    "block_ff_dim": 48,
    "attention_hidden_size": 32,
    "kv_channels": 8,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "query_pre_attn_scalar": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_target_positions": 256,
    "max_source_positions": 256,
}
"""Values of the keys that a config class has."""

OTHER_PARTS = ("vision_config", "high_res_vision_config", "audio_config", "vq_config")
"""Parts of a config beside the language model's that are made small too."""

ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SAM = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "mlp_dim": 48, "image_size": 32}
CODEBOOK = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "latent_channels": 32}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "apertus1p5": {
        "vision_config": {**CODEBOOK, "codebook_size": 16},
        "audio_config": {
            "codebook_size": 16,
            "codebook_dim": 32,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 48,
            "decoder_num_layers": 1,
            "decoder_attention_num_groups": 4,
        },
    },
    "granite4_vision": {"vision_config": {"hidden_size": 64}},
    "muse_spark": {"audio_config": {"hidden_sizes": [16] * 4, "depths": [1] * 4, "out_hidden_size": 32}},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 32}}},
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {**SAM, "downsample_channels": [32, 32]},
            "encoder_config": {
                **ENCODER,
                "num_key_value_heads": 4,
                "vocab_size": 97,
            },
        }
    },
    "unlimited_ocr": {
        "vision_config": {
            "sam_config": {**SAM, "downsample_channels": [32, 32]},
            "encoder_config": {
                **ENCODER,
                "image_size": 16,
                "patch_size": 8,
            },
        }
    },
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {**SAM, "global_attn_indexes": [0], "output_channels": 32}
    },
    "janus": {
        "vq_config": {**CODEBOOK, "num_embeddings": 16, "projection_dim": 32, "image_token_embed_dim": 32},
        "vision_config": {"projection_dim": 32, "depth": 1},
    },
    "emu3": {"vq_config": CODEBOOK},
    "molmo2": {"vision_config": {"image_size": [16, 16], "head_dim": 8, "num_position_embeddings": 4}},
    "qwen2_vl": {"vision_config": {"embed_dim": 32}},
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense"] * 4,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 16},
    },
}
"""What such parts need beside :data:`SMALL`."""

MIXED = ["sliding_attention", "full_attention"] * 2
STATEFUL = ["linear_attention", "full_attention"] * 2

INDEXED: dict[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
DIFFERENT_HEADS: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": MIXED,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    },
}

WINDOWED_HEADS: dict[str, Any] = {
    "head_dim": 16,
    "index_head_dim": 8,
    "shared_experts_intermediate_size": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 12,
}

SHARED_NOTHING: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.0] * 4,
    "intermediate_size": [48] * 4,
    "layer_types": MIXED,
}

SWITCHED_ON: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": MIXED,
}
"""Windows of Qwen, which its classes leave out by default."""
OF_IMAGES: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

HUNYUAN = {
    "rope_type": "dynamic",
    "rope_theta": 1e4,
    "alpha": 1000.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
"""RoPE parameters as in every published config of Hunyuan."""
IN_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
"""Pairs of a head for time, height and width in images."""
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("cosmos3_edge_text", "glm4v_text", "glm_ocr_text", "hy_v4_vl_text", "paddleocr_vl_text"),
            *("qwen2_5_omni_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
        ),
        IN_AXES,
    ),
    **{name: {**IN_AXES, **SWITCHED_ON} for name in ("qwen2_5_vl_text", "qwen2_vl_text")},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        }
    },
    "chameleon": {"vocabulary_map": {"<image>": 5}, "vq_config": {**CODEBOOK, "num_embeddings": 16}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "hunyuan_vl_text": {"head_dim": 8, **IN_AXES},
    "mistral4": {"head_dim": 16},
    "muse_spark_text": {"moe_hidden_size": 32},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "unlimited_ocr_text": {"num_key_value_heads": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "step3p5": {"sliding_window": WINDOW, "layer_types": MIXED, "num_sliding_attention_heads": 6},
    "apertus": {"max_position_embeddings": None},
    "apertus1p5_text": {"max_position_embeddings": None},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bailing_hybrid": {"layer_types": STATEFUL, "num_experts_per_token": 2, "num_expert_group": 1},
    "cwm": {"max_position_embeddings": None},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "num_hidden_layers": 3,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
    },
    "dots1": {"layer_types": MIXED},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3": {"num_hidden_layers": 6},
    "gemma3_text": {"num_hidden_layers": 6},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "granitemoehybrid": {"layer_types": STATEFUL, "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": 8, "rope_parameters": HUNYUAN},
    "hunyuan_v1_moe": {"head_dim": 8, "rope_parameters": HUNYUAN},
    "laguna": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"num_hidden_layers": 5},
    "mellum": {"layer_types": MIXED},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 8, "layer_types": MIXED},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "use_mem_rope": True,
        "n_mamba_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "max_seq_len": 256,
    },
    "longcat_flash": {"num_layers": 2, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": WINDOW,
    },
    "kolibri1": {"num_hidden_layers": 6},
    "jamba": {"layer_types": STATEFUL},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    **dict.fromkeys(
        ("got_ocr2", "moss_transcribe_diarize", "qwen2", "qwen2_moe", "qwen3", "smollm3"), SWITCHED_ON
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), SHARED_NOTHING),
    "qwen4_exp": INDEXED,
    "qwen4_exp_text": INDEXED,
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), DIFFERENT_HEADS),
    "cohere_compass_text": {
        "layer_types": MIXED,
        "rope_parameters": dict.fromkeys(MIXED, OF_IMAGES),
    },
    **dict.fromkeys(("dots3_note", "dots3_note_text"), WINDOWED_HEADS),
    "phi4_multimodal": {
        "sliding_window": WINDOW,
        "vision_config": {
            **{
                key: SMALL[key]
                for key in (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "image_size",
                    "patch_size",
                )
            },
            "crop_size": 16,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_blocks": 2,
            "nemo_conv_channels": 8,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "bias_max_distance": 8,
        },
    },
}
"""What families need beside or in place of :data:`SMALL`; a value of None leaves a key to the class."""

NAMED_ALONE = {
    "deepseek_ocr2": {"sliding_attention"},
    "falcon_h1": {"full_attention", "linear_attention"},
    "llava_next_video": {"conv"},
    "muse_glimmer": {"window_attention"},
    "muse_spark": {"window_attention"},
    "paddleocr_vl": {"sliding_attention"},
    "paligemma": {"sliding_attention"},
    "qwen4_exp": {"full_attention"},
    "qwen4_exp_text": {"full_attention"},
    "step3p7": {"minimax_m3_sparse"},
    "unlimited_ocr": {"full_attention"},
    "zamba2": {"full_attention"},
    "zaya": {"conv"},
}
"""Layer types that a family's code or configs name, and that its tiny model lacks: names of the masks for a layer's two
mixers, the older name of another type, and types of encoders and of other models' layers."""

WHOLE: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_id": 5,
        "audio_token_id": 6,
        "image_token_offset": 20,
        "audio_token_offset": 36,
    },
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "granite4_vision": {
        "downsample_rate": "2/4",
        "spatial_target_layers": [0],
        "deepstack_layer_map": [[0, 0]],
    },
    "molmo2": {
        "adapter_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "intermediate_size": 48,
            "text_hidden_size": 32,
            "vision_feature_layer": [-1],
        }
    },
    "muse_glimmer": {"out_hidden_size": 32, "projector_hidden_size": 32},
    "muse_spark": {"out_hidden_size": 32, "projector_hidden_size": 32},
}
"""What the config of a whole model needs beside its parts."""

ROTATES_WITHOUT_A_MODULE = ("codegen", "gptj", "roformer")
"""Families whose attention rotates queries and keys by itself."""
OF_MLP = ("dense", "moe", "sparse")
"""Layer types of transformers that say nothing of attention."""
ENCODERS_ALONE_ROTATE = ("inkling2_text", "musicgen", "musicgen_melody")
"""Families whose decoder has no RoPE, though their code speaks of it."""

Support = dict[str, Any]


OF_TIMM = ("fast_vlm", "gemma3n", "perception_lm")
"""Families whose encoder of images needs timm."""


def replace_timm(name: str) -> None:
    """Build a family's encoder of images as a module without weights: its own needs timm, and no text reaches it."""

    class Encoders:
        @staticmethod
        def from_config(config: Any) -> Any:
            of_images = config.model_type in ("gemma3n_vision", "timm_wrapper")
            return torch.nn.Identity() if of_images else transformers.AutoModel.from_config(config)

    importlib.import_module(f"transformers.models.{name}.modeling_{name}").AutoModel = Encoders


def families() -> list[str]:
    """Names of all causal families of the installed transformers, those with images included, sorted."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def tiny_config(name: str) -> Any:
    """A small config of a family: of its language model, where the family has others beside it."""
    if name not in CONFIG_MAPPING:
        missing(name)
    config_class = CONFIG_MAPPING[name]
    whole = config_class()
    text = whole.get_text_config()
    wanted = {
        **_values_for(type(text), text),
        **OVERRIDES.get(text.model_type, {}),
        **OVERRIDES.get(name, {}),
    }
    wanted = {key: value for key, value in wanted.items() if value is not None}
    tiny = type(text)(**wanted)
    decoder = decoder_key(whole)
    if decoder is None:
        return tiny
    parts = {decoder: tiny, **WHOLE.get(name, {})}
    for key in OTHER_PARTS:
        if (other := getattr(whole, key, None)) is not None:
            values = {**_values_for(type(other), other), **PARTS.get(name, {}).get(key, {})}
            parts[key] = type(other)(**values)
    return config_class(**parts)


def kinds_of(config: Any) -> set[str]:
    """The layer types of a decoder's attention."""
    return set(getattr(config, "layer_types", None) or layer_values(config)["layer_types"])


def known_kinds(name: str) -> set[str]:
    """The layer types of attention that a family's models can have, by its class's defaults or by its code's words."""
    whole = CONFIG_MAPPING[name]()
    text = whole.get_text_config()
    model_class = auto_class(whole)._model_mapping.get(type(whole), None)
    sources = "".join(
        Path(sys.modules[each.__module__].__file__).read_text()
        for each in (model_class, type(text))
        if each is not None
    )
    named = {kind for kind in ALLOWED_LAYER_TYPES if re.search(rf"[\"']{kind}[\"']", sources)}
    return kinds_of(text) | (named - set(OF_MLP))


def _values_for(config_class: type, defaults: Any) -> dict[str, Any]:
    renamed = getattr(config_class, "attribute_map", {})
    settable = {
        key: value
        for key, value in SMALL.items()
        if _has(defaults, key)
        and key not in renamed
        and not isinstance(getattr(config_class, key, None), property)
    }
    if _has(defaults, "kv_lora_rank") and "num_key_value_heads" in settable:
        # Latent attention makes keys and values of every head.
        settable["num_key_value_heads"] = settable["num_attention_heads"]
    # A window that the class leaves out is no part of what it is.
    for key in ("sliding_window", "attention_chunk_size", "head_dim", "q_lora_rank"):
        if _has(defaults, key) and getattr(defaults, key) is None:
            settable.pop(key, None)
    return settable


def _has(config: Any, key: str) -> bool:
    """Whether a config has a value that is the same for all layers."""
    try:
        return hasattr(config, key)
    except RuntimeError:
        # It differs from layer to layer.
        return False


def tiny_model(name: str, dtype: torch.dtype) -> Any:
    """A random model of a family with weights so large that what attention sees matters; eager, in evaluation mode."""
    torch.manual_seed(0)
    if name in OF_TIMM:
        replace_timm(name)
    config = tiny_config(name)
    model = auto_class(config).from_config(config, attn_implementation="eager")
    size = sum(each.numel() for each in model.parameters())
    if size > MOST_PARAMETERS:
        raise RuntimeError(f"its smallest model here has {size:,} parameters")
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1 or parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.3)
    if dtype == torch.float64 and any("Experts" in type(module).__name__ for module in model.modules()):
        # Grouped products of experts have no float64.
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def has_rope(name: str) -> bool:
    """Whether the code of a family's decoder turns queries and keys by their positions."""
    if name in ROTATES_WITHOUT_A_MODULE:
        return True
    if name in ENCODERS_ALONE_ROTATE:
        return False
    if name in NO_DECODERS:
        return True
    text = CONFIG_MAPPING[name]().get_text_config()
    if text.model_type != name and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return has_rope(text.model_type)
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return bool(getattr(text, "rope_parameters", None))
    model_class = transformers.AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[name]]
    with open(sys.modules[model_class.__module__].__file__) as file:
        return bool(re.search(r"class \w*RotaryEmbedding|\.rotary_emb\b", file.read()))


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


UNFIT = (
    ArithmeticError,
    AttributeError,
    AssertionError,
    ImportError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TimeoutError,
    TypeError,
    ValueError,
)
"""What transformers raises on a config or a call that does not suit a family."""


def entry(status: str, reason: str = "") -> Support:
    """One cell of the table, without the names of temporary folders."""
    return {"status": status, "reason": " ".join(re.sub(r" in /\S+", "", reason).split())}


def judged(check: Callable[[], Support]) -> Support:
    """A check's result: ropewalk's refusals are sentences, anything else that it raises is a failure."""
    try:
        return check()
    except RopewalkError as error:
        return entry("refused", str(error))
    except UNFIT as error:
        return entry("fails", f"{type(error).__name__}: {_short(error)}")


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return " ".join(lines[:2])[:200]


def support_of(name: str, ranks: Ranks | None = None) -> Support:
    """What works for one family: a status and a reason for each of the columns.

    Args:
        name: of the family.
        ranks: two processes for what needs them; without them it is left as None.
    """
    columns = tuple(COLUMNS)
    if name in NO_DECODERS:
        return dict.fromkeys(columns, judged(lambda: accepted(name)))
    if (refused := loading_refusal(name)) is not None:
        return dict.fromkeys(columns, entry("refused", refused))
    try:
        with at_most(SECONDS):
            plain = tiny_model(name, torch.float64)
            with torch.no_grad():
                plain(input_ids=torch.randint(3, 90, (1, 9)), use_cache=False)
    except UNFIT as error:
        return dict.fromkeys(
            columns, entry("not tried", f"no tiny model runs: {type(error).__name__}: {_short(error)}")
        )
    with at_most(4 * SECONDS):
        packed = judged(lambda: packed_training(name, plain))
        found = {
            "packed_training": packed,
            "context_parallelism": None,
            "distributed_training": None,
            "audit": judged(lambda: audit(name)),
            "planning": judged(lambda: planning(name)),
            "export": judged(lambda: export(name)),
        }
    if packed["status"] != "tested":
        return {**found, "context_parallelism": packed, "distributed_training": packed}
    if ranks is not None:
        with at_most(4 * SECONDS):
            found["context_parallelism"] = judged(lambda: context_parallelism(name, ranks))
            found["distributed_training"] = judged(lambda: distributed_training(name, packed, ranks))
    return found


def accepted(name: str) -> Support:
    """What a config of a family says that ropewalk refuses by name alone."""
    config_from_json({"model_type": name})
    return entry("WRONG", "its config is accepted")


def packed_training(name: str, plain: Any) -> Support:
    """Rows of documents longer than windows equal each document alone, outputs and gradients in float64."""
    ours = copy.deepcopy(plain)
    attach(ours, engine="sdpa", exact_rope=False)
    # As a run does, which computes logits in chunks.
    OutputHead.of(tiny_model(name, torch.float32))
    torch.manual_seed(1)
    for pattern in ("intra_document", "anchor"):
        layout = PackedLayout.from_lengths(LENGTHS, pattern, int(pattern == "anchor"), "reset")
        ids = torch.randint(3, 90, (1, layout.total_length))
        logits = ours(input_ids=ids, layout=layout).logits[0]
        cotangent = torch.randn_like(logits)
        expected, loss = logits.detach().clone(), torch.zeros((), dtype=torch.float64)
        trained = torch.zeros(layout.total_length, 1, dtype=torch.float64)
        oracle = plain
        if pattern == "anchor" and ModelConfig.of(plain.config).recurrent_layers:
            # Documents see the anchor through attention alone.
            oracle = apart_from_the_anchor(plain, layout.anchor_length)
        for tokens, alone in documents_alone(oracle, ids, layout):
            expected[tokens] = alone.detach()
            loss = loss + (alone * cotangent[tokens]).sum()
            trained[tokens] = 1
        size = float(expected.abs().max())
        off = float((logits - expected).detach().abs().max()) / size
        with torch.no_grad():
            # With a mask, transformers does not guess documents from positions that restart.
            whole = torch.ones_like(ids)
            positions = layout.position_ids[None]
            mixed = plain(ids, attention_mask=whole, position_ids=positions, use_cache=False).logits[0]
        if float((mixed - expected).abs().max()) < NOTICED * size:
            return entry("not tried", "documents that see each other change no logit of its tiny model")
        if not off <= ROUNDING:
            return entry("WRONG", f"logits of a packed row ({pattern}) are off by {off:.1e} of the largest")
        ours.zero_grad()
        oracle.zero_grad()
        (logits * cotangent * trained).sum().backward()
        loss.backward()
        theirs = {key: each.grad for key, each in oracle.named_parameters() if each.grad is not None}
        mine = {key: each.grad for key, each in ours.named_parameters() if each.grad is not None}
        largest = max(float(grad.abs().max()) for grad in theirs.values())
        for key in theirs.keys() | mine.keys():
            # A parameter that no token reaches has no gradient, or zeros.
            difference = mine.get(key, 0) - theirs.get(key, 0)
            share = float(difference.abs().max()) / largest
            if not share <= ROUNDING:
                return entry(
                    "WRONG", f"the gradient of {key} is off by {share:.1e} of the largest ({pattern})"
                )
    return exact_rotary(name)


def exact_rotary(name: str) -> Support:
    """Whether our rotary module fits too; where it does not, training needs ``exact_rope: false``."""
    plain = tiny_model(name, torch.float32)
    ours = copy.deepcopy(plain)
    try:
        attach(ours, engine="sdpa")
    except RopewalkError as error:
        return entry("tested", f"with exact_rope: false, since {error}")
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        packed = ours(ids, layout=PackedLayout.from_lengths([30], "full", 0)).logits
    off = float((packed - expected).abs().max()) / float(expected.abs().max())
    if not off <= EXACT:
        return entry("WRONG", f"logits with the exact rotary module are off by {off:.1e} of the largest")
    return entry("tested")


def context_parallelism(name: str, ranks: Ranks) -> Support:
    """A row cut over two processes, by the ring and by Ulysses, gives the logits of the whole row."""
    for kind in ("ring", "sequence"):
        said = ranks.run(sharded_difference, kind, name)
        refusals = [each for each in said if isinstance(each, str)]
        if refusals:
            return entry(*refusals[0].split("|", 1))
        worst = max(said)
        if not worst <= ROUNDING:
            return entry(
                "WRONG", f"logits of a row on two ranks ({kind}) are off by {worst:.1e} of the largest"
            )
    return entry("tested")


def sharded_difference(kind: str, name: str) -> float | str:
    """How far one rank's logits are from those of the whole row, over the largest; or what was raised.

    Args:
        kind: ``ring`` or ``sequence``, of two ranks.
    """
    torch.set_num_threads(1)
    mesh = make_mesh(MeshShape(**{kind: 2}), "cpu")
    model = tiny_model(name, torch.float64)
    said: float | str
    try:
        attach(model, engine="sdpa", exact_rope=False)
        layout = PackedLayout.from_lengths(LENGTHS, "anchor")
        torch.manual_seed(1)
        ids = torch.randint(3, 90, (1, layout.total_length))
        sharded = ShardedLayouts.of([layout], mesh.groups)
        with torch.no_grad():
            whole = model(input_ids=ids, layout=layout).logits
            mine = model(input_ids=sharded.take([ids[0]], 0), layout=sharded).logits
        row = sharded.rows[0]
        places = row.of(mesh.groups.ring_rank, mesh.groups.sequence_rank)
        held = places >= 0
        difference = mine[0][held] - whole[0][places[held]]
        said = float(difference.abs().max() / whole.abs().max())
    except RopewalkError as error:
        said = f"refused|{error}"
    except UNFIT as error:
        said = f"fails|{type(error).__name__}: {_short(error)}"
    dist.barrier()
    return said


def distributed_training(name: str, packed: Support, ranks: Ranks) -> Support:
    """Two optimizer steps of two processes are those of one, in float64.

    Rows are cut by the ring and by Ulysses. Parameters are sharded in both.

    Args:
        name: of the family.
        packed: what was found of packed training, which says whether the exact rotary module fits.
        ranks: two processes.
    """
    config = ModelConfig.of(tiny_config(name))
    setup = ModelSetup(exact_rope="exact_rope: false" not in packed["reason"])
    meshes = [{"ring": 2}, {"sequence": 2}]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(name, torch.float32)
        model.save_pretrained(folder)
        # Some language models are loaded from the config of the larger model alone.
        tiny_config(name).save_pretrained(folder)
        options = {"balancing": BALANCING if routers_of(model) else 0.0, "setup": setup}
        for mesh in meshes:
            refuse_on_mesh(MeshShape(**mesh), config, setup.exact_rope, config.methods.values())
        steps, weights = two_steps(folder, rows_with_padding(), **options)
        for mesh in meshes:
            arguments = (mesh, folder, rows_with_padding(), options)
            (found, gathered), _ = ranks.run(two_steps_on_ranks, *arguments)
            for (loss, norm, routing), (loss_alone, norm_alone, routing_alone) in zip(
                found, steps, strict=True
            ):
                off = max(abs(loss / loss_alone - 1), abs(norm / norm_alone - 1))
                if not off <= STEPS:
                    return entry("WRONG", f"the loss or gradient norm of a step ({mesh}) is off by {off:.1e}")
                if routing and routing.counts != routing_alone.counts:
                    return entry("WRONG", f"tokens of a step ({mesh}) went to other experts")
            if gathered.keys() != weights.keys():
                return entry("WRONG", f"the ranks ({mesh}) have other weights than one process")
            off, key = max(
                (float((gathered[key] - value).abs().max()), key) for key, value in weights.items()
            )
            if not off <= STEPS:
                return entry("WRONG", f"after two steps ({mesh}) {key} is off by {off:.1e}")
    return entry("tested")


def audit(name: str) -> Support:
    """The audit can tell the model's rotation from everything else that it does."""
    AuditedModel.of(tiny_model(name, torch.float32))
    return entry("tested")


def planning(name: str) -> Support:
    """The config says which layers have RoPE, and some of them see everything before them."""
    config = ModelConfig.of(tiny_config(name))
    _ = (config.layers, config.full_attention_rope.frequencies(config.trained_length), config.planning_notes)
    if config.context_layers(config.trained_length):
        return entry("tested")
    lifted = dataclasses.replace(
        config, values={**config.values, "sliding_window": None, "layer_types": None}
    )
    windows = all(layer.rotates and layer.window is not None for layer in config.layers)
    if windows and lifted.context_layers(lifted.trained_length):
        return entry(
            "tested", "with sliding_window null; if every layer has a window, no base extends the context"
        )
    return entry("refused", "no layer has both RoPE and full attention, so no base extends the context")


def export(name: str) -> Support:
    """A new base is in the saved config, and in the frequencies of the model that transformers builds of it."""
    config = ModelConfig.of(tiny_config(name))
    old = config.full_attention_rope
    wanted = Default(old.rotary_dim, 7 * old.rope_theta)
    changed = with_rope(config, wanted, 1024)
    with tempfile.TemporaryDirectory() as folder:
        changed.source.save_pretrained(folder)
        read = ModelConfig.of(transformers.AutoConfig.from_pretrained(folder))
    expected, found = (each.frequencies(1024).inv_freq for each in (wanted, read.full_attention_rope))
    if not torch.equal(expected, found):
        return entry("WRONG", "the saved config says other frequencies")
    model = auto_class(read.source).from_config(read.source, attn_implementation="eager")
    held = [buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")]
    if not any(
        each.shape == expected.shape and torch.allclose(each.double(), expected, rtol=1e-5) for each in held
    ):
        return entry("WRONG", "no rotary module built from the saved config has its frequencies")
    if not is_part(config.source):
        return entry("tested")
    if name in OF_TIMM:
        return entry("tested", "of the config alone, since the encoder of images needs the package timm")
    return whole_checkpoint(name, wanted)


def tensors_in(folder: str) -> dict[str, torch.Tensor]:
    """The tensors in the files of a checkpoint."""
    return {
        key: tensor
        for file in sorted(Path(folder).glob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


def whole_checkpoint(name: str, rope: RopeMethod) -> Support:
    """A checkpoint with encoders is saved with another RoPE and, byte for byte, every tensor of its files."""
    whole = getattr(transformers, name_of_class(name)).from_config(tiny_config(name))
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(source)
        save_model(load_model(source, ModelSetup(rope, 1024, exact_rope=False)), Path(folder))
        before, after = tensors_in(source), tensors_in(folder)
        other = sorted(before.keys() ^ after.keys())
        other += [key for key, tensor in before.items() if not torch.equal(tensor, after.get(key, tensor))]
        if other:
            return entry("WRONG", f"of the saved checkpoint, {other[0]} is not as in its source")
        read = ModelConfig.of(transformers.AutoConfig.from_pretrained(folder))
    if read.full_attention_rope != rope:
        return entry("WRONG", "the saved checkpoint says another RoPE")
    return entry("tested")
