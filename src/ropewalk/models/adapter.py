"""LoRA through peft: add an adapter to a model in memory, save and read it, merge it into the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_json
from ropewalk.io.settings import near_or_all
from ropewalk.models.adapter_settings import ALL_LINEAR, ATTENTION, AdapterSettings
from ropewalk.models.attention.indexed import indexers_of
from ropewalk.models.attention.recurrent import mixers_of
from ropewalk.models.checkpoint.save import save_config, whole_of
from ropewalk.models.config.layers import MAMBA_2
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.encoders import has_set_aside

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter, named as peft names them."""
NAME = "default"
"""Name of the adapter in a model, which peft adds to the names of parameters in memory and omits in files."""
PREFIX = "base_model.model."
"""Beginning of every name in a file of peft."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of a model in memory.

    Attributes:
        config: peft's config, as it is saved.
        tuner: peft's object that holds the model.
        trained: names of the trained parameters in the model, those outside LoRA's matrices included.
    """

    config: LoraConfig
    tuner: LoraModel
    trained: tuple[str, ...]


@dataclass(frozen=True)
class NewAdapter:
    """An adapter that is to be added to a model.

    Attributes:
        settings: kind, size and places of the adapter.
        seed: seed of the initial values, which depend on nothing else.
        base: name of the model for the adapter's config.
        trained, frozen: numbers of parameters that are trained, and that are not.
    """

    settings: AdapterSettings
    seed: int
    base: str
    trained: int
    frozen: int

    @classmethod
    def on(cls, settings: AdapterSettings, seed: int, base: str, model: Any) -> NewAdapter:
        """The adapter for a model, of which it tries the adapter on a copy without weights.

        Args:
            settings, seed, base: as for the class.
            model: a model on the ``meta`` device, which gets the adapter.

        Raises:
            RopewalkError: as for :func:`places_of`.
        """
        cls(settings, seed, base, 0, 0).add_to(model)
        sizes = [(parameter.requires_grad, parameter.numel()) for parameter in model.parameters()]
        trained = sum(size for is_trained, size in sizes if is_trained)
        return cls(settings, seed, base, trained, sum(size for _, size in sizes) - trained)

    def quantization(self, compute_dtype: torch.dtype) -> Any:
        """transformers' settings for the frozen weights; None if they are not quantized."""
        if self.settings.quantize is None:
            return None
        from transformers import BitsAndBytesConfig

        # As arXiv:2305.14314: the scales of the blocks are quantized as well.
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.settings.quantize,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
        )

    def __str__(self) -> str:
        settings = self.settings
        also = f" with {' and '.join(settings.also_train)}" if settings.also_train else ""
        return (
            f"LoRA of rank {settings.rank} and alpha {settings.alpha:g} on {', '.join(settings.targets)}{also}: "
            f"{self.trained:,} of {self.trained + self.frozen:,} parameters are trained"
        )

    def add_to(
        self, model: Any, dtype: torch.dtype = torch.float32, frozen_dtype: torch.dtype | None = None
    ) -> None:
        """Add the adapter to a transformers model in place; all parameters that it does not train are frozen.

        A new adapter changes no output, because one matrix of each pair is zero.

        Args:
            model: model in memory, or without weights on the ``meta`` device.
            dtype: dtype of the trained parameters.
            frozen_dtype: dtype of all others; None to keep theirs.

        Raises:
            RopewalkError: as for :func:`places_of`.
        """
        from peft import LoraConfig, LoraModel

        settings = self.settings
        targets, whole_modules = places_of(settings, model)
        modules = [name for name, _ in model.named_modules()]
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=_short(targets, modules, model),
            use_rslora=settings.rslora,
            base_model_name_or_path=self.base,
        )
        whole = [parameter for name in whole_modules for parameter in model.get_submodule(name).parameters()]
        # peft draws initial values from the global generator, which must stay as it is; ours are drawn below.
        with torch.random.fork_rng(devices=[]):
            tuner = LoraModel(model, config, NAME, low_cpu_mem_usage=model.device.type == "meta")
        # peft shortens a long list, as far as the names in memory allow.
        config.target_modules = {*_short(targets, modules, model)}
        for parameter in whole:
            parameter.requires_grad_(True)
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        for parameter in model.parameters():
            wanted = dtype if parameter.requires_grad else frozen_dtype
            if wanted is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(wanted)
        if model.device.type != "meta":
            _initialise(trained, self.seed)
        config.inference_mode = True
        if whole_modules:
            config.modules_to_save = _short(whole_modules, modules, model, tied=True)
            config.ensure_weight_tying = tied and "embeddings" in settings.also_train
        model._ropewalk_adapter = Adapter(config, tuner, tuple(trained))


def adapter_of(model: Any) -> Adapter | None:
    """The adapter of a transformers model; None if it has none."""
    found: Adapter | None = getattr(model, "_ropewalk_adapter", None)
    return found


def places_of(settings: AdapterSettings, model: Any) -> tuple[list[str], list[str]]:
    """The modules of a model that an adapter concerns; the model may have no weights.

    Returns:
        Names of the linear layers that get matrices, and of the modules that are trained as a whole.

    Raises:
        RopewalkError: if the model has no such module, a target is no linear layer or one that a kernel of mamba-ssm
            does not call, or the rank is too large.
    """
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    passed_by = _passed_by(model)
    linear = [
        name
        for name, each in modules.items()
        if isinstance(each, nn.Linear) and each is not head and each not in passed_by
    ]
    targets: dict[str, None] = {}
    for number, target in enumerate(settings.targets):
        key = f"adapter.targets.{number}"
        for name, each in modules.items():
            if each in passed_by and f".{name}".endswith(f".{target}"):
                raise RopewalkError(
                    f"{key} is {target!r}, which can have no adapter in {passed_by[each]}; choose from "
                    f"{', '.join(_choices(linear))}"
                )
        targets |= dict.fromkeys(_linear_layers(key, target, modules, linear, head))
    for name in targets:
        layer = modules[name]
        most = min(layer.in_features, layer.out_features)
        # A product of larger matrices has this rank at most: more would only cost memory.
        if settings.rank > most:
            raise RopewalkError(
                f"adapter.rank is {settings.rank}, but can be at most {most} for {name}, which has "
                f"{layer.in_features} inputs and {layer.out_features} outputs; lower adapter.rank, or choose other "
                "adapter.targets"
            )
    return list(targets), _whole_modules(settings.also_train, model, modules)


def _passed_by(model: Any) -> dict[nn.Module, str]:
    """Layers in which an adapter would not count or not learn, and where they are, with the reason."""
    config = ModelConfig.of(model.config)
    if config.indexed_layers:
        why = "an indexer, which no gradient reaches"
        return {part: why for each in indexers_of(model, config) for part in each.modules()}
    if config.mixer is None or config.mixer.recurrence != MAMBA_2:
        return {}
    # mamba_split_conv1d_scan_combined
    why = "Mamba-2 layers, because mamba-ssm's kernel for training takes the weight without calling the layer"
    return {mixer.get_submodule("out_proj"): why for mixer in mixers_of(model, config)}


def _linear_layers(
    key: str, target: str, modules: Mapping[str, nn.Module], linear: Sequence[str], head: nn.Module
) -> list[str]:
    """Names of the linear layers that one entry of ``targets`` means."""
    if target == ALL_LINEAR:
        found = list(linear)
    elif target == ATTENTION:
        # By class name, which transformers keeps uniform; the attribute is self_attn, attention, attn and more.
        inside = tuple(f"{name}." for name, module in modules.items() if "Attention" in type(module).__name__)
        found = [name for name in linear if name.startswith(inside)]
    else:
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        found = [name for name in named if name in set(linear)]
        if named and not found:
            what = (
                "the output head"
                if modules[named[0]] is head
                else f"of class {type(modules[named[0]]).__name__}"
            )
            raise RopewalkError(
                f"{key} is {target!r}, which is {what} and can have no adapter; choose from "
                f"{', '.join(_choices(linear))}"
            )
    if not found:
        raise RopewalkError(
            f"{key} is {target!r}, but the model has no linear layer of this name; "
            f"{near_or_all(target, _choices(linear))}"
        )
    return found


def _choices(linear: Sequence[str]) -> list[str]:
    return [ATTENTION, ALL_LINEAR, *dict.fromkeys(name.rpartition(".")[2] for name in linear)]


def _whole_modules(asked: Sequence[str], model: Any, modules: Mapping[str, nn.Module]) -> list[str]:
    """Names of the input embedding and of the modules that normalise."""
    wanted = []
    embedding = model.get_input_embeddings() if "embeddings" in asked else None
    for name, module in modules.items():
        is_norm = "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))
        if module is embedding or ("norms" in asked and is_norm):
            wanted.append(name)
    return wanted


def _short(names: Collection[str], modules: Collection[str], model: Any, tied: bool = False) -> list[str]:
    """Last parts of the names, which peft compares with the ends of names, if they mean the same modules.

    Otherwise the whole names. ``tied`` is for modules to save, where peft does not ask for a dot before the end.
    """
    # Encoders that are not in memory have modules of such names too.
    if has_set_aside(model):
        return sorted(names)
    short = sorted({name.rpartition(".")[2] for name in names})
    dot = "" if tied else "."
    meant = {name for name in modules for end in short if name == end or name.endswith(dot + end)}
    return short if meant == set(names) else sorted(names)


@torch.no_grad()
def _initialise(trained: Mapping[str, nn.Parameter], seed: int) -> None:
    """Draw A as ``nn.Linear`` does, and set B to zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained.items():
        if ".lora_A." in name:
            initial = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
            parameter.copy_(initial)
        elif ".lora_B." in name:
            parameter.zero_()


def trained_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Parameters of a model that its adapter trains, by name."""
    adapter = adapter_of(model)
    assert adapter is not None
    own = dict(model.named_parameters())
    return {name: own[name] for name in adapter.trained}


def name_in_file(name: str) -> str:
    """Name of a parameter in a file of peft."""
    return PREFIX + name.replace(f".{NAME}.", ".")


def save_adapter(
    model: Any, folder: Path, weights: Mapping[str, Tensor], base_dtype: torch.dtype | None = None
) -> None:
    """Write a folder that plain peft loads, with the model's config beside it.

    Args:
        model: model with an adapter.
        folder: an existing folder.
        weights: the trained tensors by their names in the model, whole, in any dtype.
        base_dtype: dtype of the base model that the config states; None for that of the model in memory.
    """
    adapter = adapter_of(model)
    assert adapter is not None
    tensors = {name_in_file(name): each.detach().contiguous().cpu() for name, each in weights.items()}
    if adapter.config.ensure_weight_tying:
        # peft reads the embedding under both of its names.
        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = (
            name_in_file(f"{names[id(each)]}.weight")
            for each in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        tensors[head] = tensors[embedding].clone()
    save_file(tensors, folder / WEIGHTS)
    adapter.config.save_pretrained(str(folder))
    # peft writes sets in an order that differs between processes.
    values = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
    write_json(
        folder / CONFIG,
        {key: sorted(each) if isinstance(each, list) else each for key, each in values.items()},
    )
    save_config(model, folder)
    if base_dtype is not None and whole_of(model) is None:
        stated = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", {**stated, "dtype": str(base_dtype).removeprefix("torch.")})


def read_adapter(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read tensors that :func:`save_adapter` wrote; those that are missing are left out.

    Args:
        folder: folder of the adapter.
        names: names of parameters in the model.

    Raises:
        RopewalkError: if the file has other tensors too.
    """
    there = load_file(folder / WEIGHTS)
    found = {name: there.pop(name_in_file(name)) for name in names if name_in_file(name) in there}
    # The output head is a copy of a trained embedding that is tied to it.
    others = [n for n, each in there.items() if not any(torch.equal(each, known) for known in found.values())]
    if others:
        raise RopewalkError(
            f"the adapter in {folder} has the weight {min(others)}, which the recipe's adapter does not have; restore "
            "the adapter settings that it was written with"
        )
    return found


def merge_adapter(model: Any) -> None:
    """Add each pair of matrices to the weight that it belongs to, and remove the adapter from the model, in place."""
    adapter = adapter_of(model)
    assert adapter is not None
    adapter.tuner.merge_and_unload()
    del model._ropewalk_adapter
    model.requires_grad_(True)
