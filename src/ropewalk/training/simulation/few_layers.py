"""Play a step of a deep model with a few of its layers, and extend what it takes to all of them.

Layers of one kind take the same operations, bytes and memory, so that everything grows in proportion to their number.
The first two and the last two layers of a shape are played, because FSDP2 gathers a layer ahead, so that the ends of a
model need another memory than its middle; and between them one of each other kind, since a model makes masks and
rotations once for a kind. Each kind that has more layers is played once more, with one more of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import nn

from ropewalk.models.attention.hooks import localities_by_layer
from ropewalk.training.simulation.recording import in_backward

LEAST_LAYERS = 4 + 5
"""Layers that are played in two runs at least; a model of so many is played whole."""


class Kind(NamedTuple):
    """Kind of a layer; layers of one kind are equal.

    Attributes:
        shape: its modules and its parameters.
        rest: its window or chunk, and what the config states of it.
    """

    shape: Hashable
    rest: Hashable = None


Kinds = tuple[Kind, ...]
"""Kind of each layer of a model."""


def kinds_of(model: nn.Module) -> Kinds:
    """Kind of each decoder layer of a transformers model with hooks.

    Empty if the model has no list of all its layers.
    """
    layers = _layers(model)
    if layers is None:
        return ()
    stated = [values for config in _configs(model) for _, values in _lists(config, len(layers))]
    localities = localities_by_layer(model)
    return tuple(
        Kind(
            (
                tuple((name, type(each).__name__) for name, each in layer.named_modules()),
                tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters()),
            ),
            (localities[number], tuple(str(values[number]) for values in stated)),
        )
        for number, layer in enumerate(layers)
    )


def some_of_each(kinds: Kinds) -> tuple[int, ...]:
    """Numbers of the first two and the last two layers of each shape, and of the first of each kind not among these."""
    left = Counter(kind.shape for kind in kinds)
    seen: Counter[Hashable] = Counter()
    kept = []
    for number, (shape, _) in enumerate(kinds):
        left[shape] -= 1
        seen[shape] += 1
        if seen[shape] <= 2 or left[shape] < 2:
            kept.append(number)
    at_ends = {kinds[number] for number in kept}
    return tuple(sorted((*kept, *(kinds.index(kind) for kind in {*kinds} - at_ends))))


def further(kinds: Kinds) -> dict[int, int]:
    """By number of the first layer of each kind that :func:`some_of_each` leaves out: how many it leaves out."""
    kept = some_of_each(kinds)
    left = [number for number in range(len(kinds)) if number not in kept]
    number_of = Counter(kinds[number] for number in left)
    return {next(each for each in left if kinds[each] == kind): number for kind, number in number_of.items()}


def layers_of_run(kinds: Kinds, which: int) -> tuple[int, ...] | None:
    """Numbers of the layers of a run: of 0, a few or all, and of each other one, these and one of :func:`further`.

    None if there is no such run.
    """
    few, more = some_of_each(kinds), [*further(kinds)]
    # As many layers as all runs together are played as they are.
    if len(few) + len(more) * (len(few) + 1) >= len(kinds):
        few, more = tuple(range(len(kinds))), []
    if which > len(more):
        return None
    return tuple(sorted((*few, *more[which - 1 : which]))) if which else few


def watch_layers(model: nn.Module, numbers: Sequence[int], enters: Callable[[int], None]) -> None:
    """Call ``enters`` with a layer's number when its forward or its backward begins, but not for a recomputation."""
    for number, layer in zip(numbers, _layers(model) or (), strict=False):

        def begins(*_: Any, number: int = number) -> None:
            if not in_backward():
                enters(number)

        def ends(_: Any, __: Any, output: Any, number: int = number) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad and not in_backward():
                hidden.register_hook(lambda _: enters(number))

        layer.register_forward_pre_hook(begins)
        layer.register_forward_hook(ends)


def keep_layers(model: nn.Module, kept: Sequence[int]) -> None:
    """Remove all other layers from a model, in place."""
    layers = _layers(model)
    assert layers is not None
    number = len(layers)
    for config in _configs(model):
        for name, values in _lists(config, number):
            setattr(config, name, [values[layer] for layer in kept])
        if getattr(config, "num_hidden_layers", None) == number:
            config.num_hidden_layers = len(kept)
    for layer in reversed(range(number)):
        if layer not in kept:
            del layers[layer]


def _layers(model: nn.Module) -> nn.ModuleList | None:
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)  # type: ignore[union-attr,operator]
    found = (each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == number)
    return next(found, None)


def _configs(model: nn.Module) -> list[Any]:
    """The config objects of all modules, each once."""
    found = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    return list(found.values())


def _lists(config: Any, number: int) -> list[tuple[str, list[Any]]]:
    """Settings of a config that have an entry for each layer."""
    return [
        (name, value)
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == number and not name.startswith("_")
    ]
