"""Keep what lies beside the text decoder of a model out of memory: encoders of images or sounds, and projectors."""

from __future__ import annotations

from typing import Any

from torch import nn

from ropewalk.errors import RopewalkError

RUN_WITH_TEXT = ("Gemma3nMultimodalEmbedder",)
"""Classes of modules beside the decoder that a call with text alone runs too."""


class SetAside(nn.Module):
    """Stands in a model for a module that is not in memory; it has no weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RopewalkError(
            f"{self.name} is not in memory, because ropewalk runs models on text alone; load the checkpoint with "
            "transformers for images and sounds"
        )


def set_encoders_aside(model: Any) -> None:
    """Replace every module beside the decoder and the output head by one without weights, in place.

    What a call with text alone runs as well is kept and frozen.

    Args:
        model: a transformers model, which may be on the ``meta`` device.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    path = next(name for name, module in model.named_modules() if module is decoder)
    owner = model
    for part in path.split(".") if path else ():
        for name, child in list(owner.named_children()):
            if type(child).__name__ in RUN_WITH_TEXT:
                child.requires_grad_(False)
            elif name != part and child is not head:
                setattr(owner, name, SetAside(name))
        owner = getattr(owner, part)


def has_set_aside(model: nn.Module) -> bool:
    """Whether modules of a model were replaced by :func:`set_encoders_aside`."""
    return any(isinstance(module, SetAside) for module in model.modules())
