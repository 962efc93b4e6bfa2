"""Count the parameters of a model from its config, without its weights."""

from __future__ import annotations

from ropewalk.models.config.file import CONFIG_ERRORS, quiet, rebuilt
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.rope.rotary import teach_transformers


def count_parameters(config: ModelConfig) -> int | None:
    """Number of parameters of the decoder and its output head as transformers creates them; tied ones count once.

    The model is built on the ``meta`` device, which takes milliseconds and no memory for weights, so mixers, biases and
    experts of every family are counted by the class that defines them.

    Returns:
        None if transformers has no causal language model for the config, or rejects it.

    Example:
        >>> from ropewalk.models.config.file import config_from_json
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> count_parameters(config_from_json({"model_type": "llama", "vocab_size": 10, **sizes}))
        824
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    teach_transformers()
    try:
        complete = rebuilt(config)
        if complete is None:
            return None
        # A decoder that transformers has beside encoders alone gets its output head from the class of the whole.
        alone = type(complete) in MODEL_FOR_CAUSAL_LM_MAPPING
        if not alone and config.whole_type in (None, config.model_type):
            return None
        with quiet(), torch.device("meta"):
            made = AutoModelForCausalLM if alone else AutoModel
            model = made.from_config(complete, trust_remote_code=False)
    except CONFIG_ERRORS:
        return None
    count: int = sum(parameter.numel() for parameter in model.parameters())
    if not alone and not config.values.get("tie_word_embeddings"):
        count += model.get_input_embeddings().weight.numel()
    return count
