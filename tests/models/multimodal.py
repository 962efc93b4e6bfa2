"""Tiny checkpoints of models with encoders of images, in the spelling and with the files of published ones."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from ropewalk.models.config.auto_class import name_of_class
from tests.models.every_family import tiny_config
from tests.training.tiny import save_tokenizer

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "mistral3", "kimi_k25", "internvl", "step3p7", "gemma3", "llama4")
FILES = {
    "preprocessor_config.json": b'{"size":  {"height": 16},\n "image_processor_type": "Any"}',
    "video_preprocessor_config.json": b'{ "fps": 2.50 }\n\n',
    "processor_config.json": b'{\r\n"image_seq_length": 4}',
    "chat_template.jinja": b"{{ bos_token }}{# no end of line #}",
    "generation_config.json": b'{"top_k":  5, "eos_token_id": 1, "do_sample": true}',
    "processing_of_images.py": b"# code of a processor\r\n",
}
"""Files beside a model, in spellings that no program here writes."""
OF_DECODER = (
    "language_model.",
    "model.language_model.",
    "lm_head.",
    "model.layers.",
    "model.norm.",
    "model.embed",
)
"""Beginnings of the names of the decoder's tensors in the files of these families."""


def save_whole(folder: Path, family: str) -> Path:
    """A random checkpoint whose encoders are in bfloat16 beside a decoder in float32.

    Its parameters are so large that what attention sees matters.
    """
    torch.manual_seed(0)
    config = tiny_config(family)
    whole = getattr(transformers, name_of_class(family)).from_config(config)
    for name, parameter in whole.named_parameters():
        if parameter.dim() > 1 and "vision" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    whole.save_pretrained(folder)
    tensors = {
        # transformers writes Kimi's layers under another name than the one that it was published with.
        name.replace("language_model.model.blocks.", "language_model.model.layers."): each
        for name, each in load_file(folder / "model.safetensors").items()
    }
    stored = {name: each if is_decoder(name) else each.to(torch.bfloat16) for name, each in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if family == "qwen2_5_vl":
        _write_flat(folder / "config.json")
    save_tokenizer(folder)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def is_decoder(name: str) -> bool:
    """Whether a tensor in the files of a family belongs to its decoder."""
    return name.startswith(OF_DECODER)


def _write_flat(path: Path) -> None:
    """The config.json of Qwen2.5-VL as published: the decoder's values at the top level, and RoPE of type mrope."""
    stated = json.loads(path.read_text())
    decoder = stated.pop("text_config")
    rope = decoder.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    flat = {
        **decoder,
        **stated,
        "rope_theta": theta,
        "rope_scaling": {**rope, "rope_type": "mrope", "type": "mrope"},
    }
    path.write_text(json.dumps(flat))


def plain_decoder(folder: Path, dtype: torch.dtype = torch.float64):
    """What plain transformers computes of text: the model of its class for images, and the decoder in it for Llama 4.

    transformers 5.24 fails in the call of Llama 4's whole model.
    """
    family = json.loads((folder / "config.json").read_text())["model_type"]
    loads = getattr(transformers, name_of_class(family))
    model = loads.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    return model.language_model if family == "llama4" else model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the files of a checkpoint."""
    return {
        name: each
        for file in sorted(folder.glob("model*.safetensors"))
        for name, each in load_file(file).items()
    }


def assert_same_beside_decoder(before: Path, after: Path) -> None:
    """Two checkpoints have tensors of the same names, and those of the encoders are the same bytes."""
    old, new = tensors_of(before), tensors_of(after)
    assert old.keys() == new.keys()
    beside = [name for name in old if not is_decoder(name)]
    assert len(beside) > 5
    for name in beside:
        assert new[name].dtype == old[name].dtype == torch.bfloat16, name
        assert torch.equal(old[name].view(torch.int16), new[name].view(torch.int16)), name
