"""Tiny models with peaked attention, and what they compute by themselves and in an audit."""

import torch
import transformers

from ropewalk.audit import replaced_attention
from ropewalk.audit.passes import shifted
from tests.models.families import ATTENTIONS, COMMON, FAMILIES, tiny_model

LENGTH = 40
ROUNDINGS_A_LAYER = 8
"""A layer rounds the hidden states about this often: two norms, q·k, weights, values, two projections, two sums."""


def row(length=LENGTH, vocab=97):
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(1))


def peaked(model):
    """Matrices three times as large: scores of several units, so that attention is far from even."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def tiny(family, **more):
    if not more:
        return peaked(tiny_model(family))
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **extra, **more})
    torch.manual_seed(0)
    return peaked(
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    ).eval()


def other(name, **more):
    config = getattr(transformers, name)(**{**COMMON, **more})
    torch.manual_seed(0)
    return peaked(
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    ).eval()


def stock_logits(model, ids, shift=0, **options):
    with torch.no_grad():
        return model(
            ids[None], position_ids=shifted(len(ids), shift)[None], use_cache=False, **options
        ).logits[0]


def logits(runner, ids, arithmetic, shift=0):
    return torch.cat(list(runner.logits(runner.run(ids, arithmetic, shifted(len(ids), shift)))))


def units(model, dtype):
    """What roundings to a dtype may add up to, over all layers, relative to the largest logit."""
    return ROUNDINGS_A_LAYER * model.config.num_hidden_layers * torch.finfo(dtype).eps


REFUSED = {"granite_swa", "llama4"}
"""Of the families with windows, sinks, chunks or latent attention, those whose roundings the audit does not know."""
SHARP = [*sorted(ATTENTIONS.keys() - REFUSED), "llama4 without norm"]


def sharp(name):
    """One of ``SHARP``, whose windows and chunks are shorter than the rows here."""
    if name in ATTENTIONS:
        return tiny_model(name, sharp=True)
    return other("Llama4TextConfig", **ATTENTIONS["llama4"][1], use_qk_norm=False)


def state_of(model):
    """Everything of a model that a pass could change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "experts": model.get_experts_implementation(),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "padding": [m.padding_idx for m in model.modules() if isinstance(m, torch.nn.Embedding)],
        "training": [m.training for m in model.modules()],
        "places": {name: (id(x), x.data_ptr(), x.dtype, x.requires_grad) for name, x in tensors.items()},
        "bytes": {
            name: x.detach().clone().flatten().view(torch.uint8).tolist() for name, x in tensors.items()
        },
        "default dtype": torch.get_default_dtype(),
        "active": len(replaced_attention._active),
    }
