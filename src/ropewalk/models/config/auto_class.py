"""The class of transformers that loads the model of a config, and what of a larger model it leaves out."""

from __future__ import annotations

import os
import sys
from typing import Any

from ropewalk.models.config.model import decoder_key


def auto_class(config: Any) -> Any:
    """``AutoModelForCausalLM``, or ``AutoModelForImageTextToText`` for a type that the former does not know.

    Args:
        config: transformers config, of the whole model.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    known = type(config)
    with_images = known not in MODEL_FOR_CAUSAL_LM_MAPPING and known in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def decoder_module(config: Any) -> Any:
    """transformers' module with the code of a model's decoder; None if transformers has none.

    Beside encoders, a decoder may be of another family, with a module of its own: that of LFM2-VL is LFM2's, and Kimi
    K2.5's is DeepSeek-V3's.

    Args:
        config: transformers config, of the whole model.
    """
    from transformers import MODEL_MAPPING

    made = MODEL_MAPPING.get(type(config.get_text_config()), None)
    if made is None:
        made = auto_class(config)._model_mapping.get(type(config), None)
    return None if made is None else sys.modules[made.__module__]


def plain_model(path: str | os.PathLike[str], trust_remote_code: bool = False, **options: Any) -> Any:
    """The model that plain transformers loads from a folder.

    Args:
        path: the folder.
        trust_remote_code, options: as for ``from_pretrained``.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return auto_class(config).from_pretrained(path, trust_remote_code=trust_remote_code, **options)


def name_of_class(model_type: object) -> str:
    """The class with which a user loads the whole model of a type, with its encoders of images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    with_images = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return "AutoModelForImageTextToText" if with_images else "AutoModelForCausalLM"


def is_part(config: Any) -> bool:
    """Whether the decoder is only a part of the model that a config describes, beside encoders of images or sounds.

    Code that comes with a checkpoint is not considered.
    """
    return type(config).__module__.startswith("transformers.") and decoder_key(config) is not None


def loads_decoder_alone(config: Any) -> bool:
    """Whether the class of :func:`auto_class` leaves encoders out: it takes the decoder's config, not the whole."""
    made = auto_class(config)._model_mapping.get(type(config), None)
    return made is not None and is_part(config) and made.config_class is not type(config)


def encoders_note(config: Any) -> str | None:
    """One sentence on what lies beside the decoder of a model; None if it is a decoder alone.

    Args:
        config: transformers config, of the whole model.
    """
    if not is_part(config):
        return None
    return (
        f"only the language model of {config.model_type} runs and changes; its encoders of images or sounds and the "
        "files of its processor are saved with it as they are"
    )
