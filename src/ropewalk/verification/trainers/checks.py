"""What the probe checks in a recorded step, and what each finding says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.models.compute.losses import OutputHead, decoder_of
from ropewalk.models.config.auto_class import plain_model
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.rope.frequencies import INV_FREQ
from ropewalk.verification.checks.effective_rope import TOKENS, Applied, ByLayerType, angles_outcome, captured
from ropewalk.verification.result import Outcome
from ropewalk.verification.trainers.step import OUTSIDE, UNCLEAR, MicroBatch
from ropewalk.verification.trainers.target import Documents, Subject

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Relative change of a float32 hidden state that reordered sums explain; any change of a 16-bit one is larger."""
EQUAL = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest relative difference of two weights that count as equal; weights are read from rounded gradients."""
EQUAL_IN_16_BITS = 0.02
NUDGE = 0.5
"""Change of one token's input to a layer, relative to its size."""
LEAST_SEEN = 1e-9
SEED = 0


@dataclass(frozen=True)
class Weights:
    """Weights of the targets of one micro-batch on one rank; what token means are judged by.

    Attributes:
        values: one weight per target.
        tolerance: largest relative difference of equal weights.
    """

    values: tuple[float, ...]
    tolerance: float


def weights_of(batch: MicroBatch) -> Weights:
    """Weights of a recorded micro-batch."""
    assert batch.targets is not None
    assert batch.weights is not None
    values = batch.weights[batch.targets >= 0].tolist()
    tolerance = EQUAL.get(batch.hidden_dtype, EQUAL_IN_16_BITS)
    return Weights(tuple(values), tolerance)


def _run(model: Any, batch: MicroBatch, ids: Tensor) -> Tensor:
    """Last hidden states ``[rows, tokens, hidden_size]`` of a micro-batch with other token ids."""
    args, kwargs = batch.with_ids(ids)
    # The same seed for each pass, so that dropout is the same.
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(SEED)
        output = decoder_of(model)(*args, **kwargs)
    hidden: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return hidden.detach()


def _moved(base: Tensor, changed: Tensor, noise: float) -> Tensor:
    """Whether each token's hidden state moved by more than rounding: bool ``[rows, tokens]``."""
    scale = base.float().abs().amax(-1).clamp_min(LEAST_SEEN)
    return ((changed.float() - base.float()).abs().amax(-1) > (ROUNDING + noise) * scale).cpu()


@dataclass(frozen=True)
class Move:
    """A token that moved losses of another document, or earlier losses of its own.

    Attributes:
        source, token: document and number of the perturbed token.
        moved: document whose losses moved.
        change: largest change of a loss in nats; 0 if only tokens without a target moved.
    """

    source: int
    token: int
    moved: int
    change: float


def moves_of(
    model: Any, batches: Sequence[MicroBatch], per_document: int, spare: int
) -> tuple[list[Move], bool]:
    """Perturb one token at a time and compare all other tokens of its micro-batch.

    Args:
        model: the model after the step.
        batches: recorded micro-batches.
        per_document: number of tokens to perturb in each document.
        spare: token id that no document has.

    Returns:
        What moved that must not have, and whether some micro-batch held two documents.
    """
    found, several = [], False
    head = OutputHead.unchecked(model)
    for batch in batches:
        base = _run(model, batch, batch.ids)
        # Kernels that are not deterministic make two equal passes differ; such a difference is no leak.
        again = _run(model, batch, batch.ids)
        noise = float(
            ((again - base).float().abs().amax(-1) / base.float().abs().amax(-1).clamp_min(LEAST_SEEN)).max()
        )
        present = sorted(set(batch.owners.flatten().tolist()) - {OUTSIDE})
        several |= len(present) > 1
        for document in present:
            own = (batch.owners == document).nonzero().tolist()
            for row, column in _spread(own, per_document):
                ids = batch.ids.clone()
                ids[row, column] = spare
                changed = _run(model, batch, ids)
                # Twice, because the difference of two passes has the noise of both.
                moved = _moved(base, changed, 2 * noise)
                place = int(batch.places[row, column])
                # Later tokens of its own document are allowed to read it.
                earlier = (batch.owners == document) & (batch.places < place)
                for other in present:
                    cells = moved & (earlier if other == document else batch.owners == other)
                    if cells.any():
                        found.append(Move(document, place, other, _change(batch, head, base, changed, cells)))
    return found, several


def _spread(cells: list[list[int]], count: int) -> list[list[int]]:
    """The first, the last, and others in between, at most ``count``."""
    if len(cells) <= count:
        return cells
    return [cells[number * (len(cells) - 1) // (count - 1)] for number in range(count)]


@torch.no_grad()
def _change(batch: MicroBatch, head: OutputHead, base: Tensor, changed: Tensor, cells: Tensor) -> float:
    assert batch.targets is not None
    cells = cells & (batch.targets >= 0)
    if not cells.any():
        return 0.0
    targets = batch.targets[cells].to(base.device)
    before, after = (
        F.cross_entropy(head.logits(each[cells.to(base.device)]), targets, reduction="none")
        for each in (base, changed)
    )
    return float((after - before).abs().max())


def documents_apart(moves: Sequence[Move], several: bool) -> Outcome:
    """No token moves the losses of another document."""
    leaks = [move for move in moves if move.moved != move.source]
    if not leaks:
        return (
            Outcome(0.0, 0.0, True, "no token affects another document's losses")
            if several
            else Outcome.not_run(
                "each micro-batch held one document; raise the batch size, or turn on packing, to see leaks"
            )
        )
    first = max(leaks, key=lambda move: move.change)
    pairs = len({(move.source, move.moved) for move in leaks})
    others = sorted({move.moved for move in leaks if move.source == first.source})
    return Outcome(
        first.change,
        0.0,
        False,
        f"token {first.token} of document {first.source} affects losses of {_documents(others)}, by up to "
        f"{first.change:.2g} nats; {pairs} pairs of documents leak; give the attention the documents' boundaries "
        "(position_ids that restart and no attention_mask, or cu_seq_lens with an engine that reads them)",
    )


def causal(moves: Sequence[Move]) -> Outcome:
    """No token moves earlier losses of its own document."""
    back = [move for move in moves if move.moved == move.source]
    if not back:
        return Outcome(0.0, 0.0, True, "no token affects earlier losses of its document")
    first = max(back, key=lambda move: move.change)
    return Outcome(
        first.change,
        0.0,
        False,
        f"token {first.token} of document {first.source} affects losses before it, by up to {first.change:.2g} nats; "
        "use a causal mask",
    )


def _documents(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (" and others" if len(numbers) > 4 else "")
    return f"{'document' if len(numbers) == 1 else 'documents'} {shown}"


def _offsets(batches: Sequence[MicroBatch]) -> Counter[int]:
    """How far behind its token each target stands in its row; tokens outside documents are not counted."""
    counts: Counter[int] = Counter()
    for batch, row, column in _trained(batches):
        assert batch.targets is not None
        # No document has a token id twice, so the id tells where the target stands; padding and EOS may repeat, so the
        # place nearest to the expected one counts.
        there = (batch.ids[row] == batch.targets[row, column]).nonzero().flatten()
        counts[int(there[(there - column - 1).abs().argmin()]) - column if len(there) else 10**9] += 1
    return counts


def _trained(batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, int, int]]:
    cells = []
    for batch in batches:
        assert batch.targets is not None
        known = (batch.targets >= 0) & (batch.owners != OUTSIDE)
        cells += [(batch, row, column) for row, column in known.nonzero().tolist()]
    return cells


def unclear_targets(batches: Sequence[MicroBatch]) -> str | None:
    """Why targets are unknown; None if they are known."""
    targets = [batch.targets for batch in batches]
    if any(each is None for each in targets):
        return "the loss has no gradient at the decoder's last hidden state"
    count = sum(int((each == UNCLEAR).sum()) for each in targets if each is not None)
    if count:
        return (
            f"the gradients of {count} tokens are not those of cross entropy on one target (label smoothing, "
            "distillation, or a head that is no linear map)"
        )
    if not any(bool((each >= 0).any()) for each in targets if each is not None):
        return "no token has a target"
    return None


def labels_are_next(batches: Sequence[MicroBatch]) -> tuple[Outcome, int]:
    """Each target is the token after it; also returns the offset that most targets have."""
    counts = _offsets(batches)
    total, offset = counts.total(), counts.most_common(1)[0][0]
    if set(counts) == {1}:
        return Outcome(0.0, 0.0, True, f"{total} targets, each the next token"), 1
    wrong = total - counts[1]
    # A target across a boundary also has offset 1, so a few other offsets are a fault of their own.
    advice = {2: "labels are shifted twice: by the data and by the loss", 0: "labels are not shifted at all"}
    what = advice.get(offset, "shift labels by one token, once")
    where = "the token itself" if offset == 0 else f"the token {offset} places on"
    return (
        Outcome(
            float(wrong),
            0.0,
            False,
            f"{wrong} of {total} targets are not the next token, most are {where}; {what}",
        ),
        offset,
    )


def targets_stay(batches: Sequence[MicroBatch], offset: int, owners: dict[int, int]) -> Outcome:
    """No target belongs to another document."""
    if offset != 1:
        return Outcome.not_run("labels are shifted wrongly; repair that first")
    crossing = []
    for batch, row, column in _trained(batches):
        assert batch.targets is not None
        target = int(batch.targets[row, column])
        own, other = int(batch.owners[row, column]), owners.get(target, OUTSIDE)
        if other not in (OUTSIDE, own):
            crossing.append((own, other))
    if not crossing:
        return Outcome(0.0, 0.0, True, "no target is in another document")
    own, other = crossing[0]
    return Outcome(
        float(len(crossing)),
        0.0,
        False,
        f"{len(crossing)} targets are in another document: the last token of document {own} is trained to predict the "
        f"first of document {other}; set the label of each document's first token to -100",
    )


def documents_whole(seen: Sequence[dict[int, list[list[int]]]], documents: Documents) -> Outcome:
    """Each document that was trained on is in one row, once and in order.

    Args:
        seen: for each rank, the numbers of the tokens of each document, one list for each row that has any.
        documents: the documents.
    """
    pieces: dict[int, list[list[int]]] = defaultdict(list)
    for each in seen:
        for number, there in each.items():
            pieces[number] += there
    cut = {
        number: there
        for number, there in sorted(pieces.items())
        if any(each != list(range(len(documents[number]))) for each in there)
    }
    if cut:
        number, there = next(iter(cut.items()))
        return Outcome(
            float(len(cut)),
            0.0,
            False,
            f"{len(cut)} of {len(pieces)} documents are not whole: document {number} of {len(documents[number])} "
            f"tokens has {' + '.join(str(len(each)) for each in there)} in one row each; later tokens miss their "
            "context, so pack whole documents (best-fit) or lengthen the rows",
        )
    # Equal data on every rank trains each document several times per step and looks right on each rank alone.
    twice = [number for number, there in sorted(pieces.items()) if len(there) > 1]
    if twice:
        return Outcome(
            float(len(twice)),
            0.0,
            False,
            f"{_documents(twice)} are in several rows of one step; under torchrun, give each rank data of its own",
        )
    return Outcome(
        0.0, 0.0, True, f"{len(pieces)} of {len(documents)} documents in this step, each in one row"
    )


def pieces_of(batches: Sequence[MicroBatch]) -> dict[int, list[list[int]]]:
    """For each document, the numbers of its tokens in each row that has any of them."""
    found: dict[int, list[list[int]]] = defaultdict(list)
    for batch in batches:
        for owners, places in zip(batch.owners, batch.places, strict=True):
            for number in sorted(set(owners.tolist()) - {OUTSIDE}):
                found[number].append(places[owners == number].tolist())
    return dict(found)


def token_mean(ranks: Sequence[Sequence[Weights]], averages: bool) -> Outcome:
    """Every target of the step has the same weight, and the weights add up to 1.

    Args:
        ranks: for each rank, the weights of its micro-batches.
        averages: whether gradients are averaged over ranks rather than added up.
    """
    groups = [
        (rank, number, each)
        for rank, batches in enumerate(ranks)
        for number, each in enumerate(batches)
        if each.values
    ]
    values = [value for *_, each in groups for value in each.values]
    tolerance = max(each.tolerance for *_, each in groups)
    low, high = min(values), max(values)
    spread = high / low - 1 if low > 0 else float("inf")
    if spread > tolerance:
        return Outcome(spread, tolerance, False, _uneven(groups, tolerance))
    # An average over ranks divides every gradient once more, which the recorded weights do not contain.
    total = sum(values) / (len(ranks) if averages else 1)
    if abs(total - 1) > tolerance:
        return Outcome(
            abs(total - 1),
            tolerance,
            False,
            f"all {len(values)} targets weigh the same, but their weights add up to {total:.4g} instead of 1: the "
            "gradient is that many times the gradient of the token mean; divide by the targets of the whole step, once",
        )
    # Equal weights prove nothing if a mean of means would have given the same ones.
    sizes = {len(each.values) for *_, each in groups}
    if len(groups) < 2 or len(sizes) < 2:
        what = (
            "one micro-batch"
            if len(groups) < 2
            else f"{len(groups)} micro-batches of {sizes.pop()} targets each"
        )
        return Outcome.not_run(
            f"the step had {what}, where a mean of means equals the token mean; use several micro-batches of different "
            "size (gradient_accumulation_steps, or torchrun)"
        )
    return Outcome.within(
        spread,
        tolerance,
        f"{len(values)} targets in {len(groups)} micro-batches on {len(ranks)} "
        f"{'rank' if len(ranks) == 1 else 'ranks'}, each with the same weight",
        "",
    )


def _uneven(groups: Sequence[tuple[int, int, Weights]], tolerance: float) -> str:
    """What makes weights differ."""

    def name(rank: int, number: int) -> str:
        return f"micro-batch {number} of rank {rank}"

    means = [sum(each.values) / len(each.values) for *_, each in groups]
    inside = [max(each.values) / min(each.values) - 1 if min(each.values) > 0 else 1.0 for *_, each in groups]
    if max(inside) > tolerance:
        rank, number, _ = groups[inside.index(max(inside))]
        return (
            f"targets within {name(rank, number)} weigh differently (up to {max(inside) + 1:.2f} times): the loss is "
            "no mean over its tokens; sum token losses and divide once"
        )
    small, large = means.index(max(means)), means.index(min(means))
    sums = [sum(each.values) for *_, each in groups]
    by_rank = defaultdict(list)
    for (rank, _, _), mean in zip(groups, means, strict=True):
        by_rank[rank].append(mean)
    over = (
        "ranks"
        if all(max(each) / min(each) - 1 <= tolerance for each in by_rank.values())
        else "micro-batches"
    )
    alike = over == "micro-batches" and max(sums) / min(sums) - 1 <= tolerance
    what = f"a mean of the means of {over}" if alike or over == "ranks" else "no token mean"
    return (
        f"the loss is {what}: a target of {name(*groups[small][:2])} ({len(groups[small][2].values)} targets) weighs "
        f"{means[small] / means[large]:.2f} times one of {name(*groups[large][:2])} ({len(groups[large][2].values)}); "
        f"divide the sum of token losses by the targets of the whole step, over {over}"
    )


def rope_now(model: Any, config: ModelConfig) -> ByLayerType:
    """Angles that a model's rotary module applies, up to the config's longest context."""
    ids, positions = _far(config)
    mask = torch.ones(1, len(ids), dtype=torch.int64, device=model.device)

    def run() -> None:
        decoder_of(model)(
            ids[None].to(model.device),
            position_ids=positions[None].to(model.device),
            attention_mask=mask,
            use_cache=False,
        )

    # In training mode, dropout would draw from the random state that the trainer's step is about to use.
    was = model.training
    model.eval()
    try:
        return captured(model, run)
    finally:
        model.train(was)


def _far(config: ModelConfig) -> tuple[Tensor, Tensor]:
    # Rounded frequencies show at far positions only.
    far = torch.linspace(2, _length(config) - 1, TOKENS - 2).long()
    positions = torch.cat([torch.arange(3), far]).unique()
    return torch.zeros_like(positions), positions


def _length(config: ModelConfig) -> int:
    return int(config.values.get("max_position_embeddings") or 2048)


def rope_in_training(
    built: ByLayerType, batches: Sequence[MicroBatch], model: Any, config: ModelConfig
) -> Outcome:
    """RoPE of the model as it was built, and of every micro-batch of the step.

    Args:
        built: what :func:`rope_now` returned before the step.
        batches: recorded micro-batches.
        model: the model.
        config: states the expected RoPE.
    """
    first = angles_outcome(
        {"before the step": built}, config.methods, _far(config)[1], _length(config), "config"
    )
    advice = (
        "; build RoPE from the complete config, and cast parameters without the buffers of the rotary module"
    )
    if not first.passed:
        return Outcome(first.error, first.budget, False, first.note + advice)
    for number, batch in enumerate(batches):
        for kind, (positions, applied) in batch.rotary.items():
            values, where = _first_of_each(positions)
            # Without the first positions (a shard of a row, left padding), angles_outcome cannot name the frequencies.
            if values[:2].tolist() != [0, 1]:
                continue
            part = Applied(applied.cos[where], applied.sin[where], applied.dtype, applied.exact)
            length = int(values.max()) + 1
            found = angles_outcome(
                {f"in micro-batch {number} of the step": {kind: part}},
                config.methods,
                values,
                length,
                "config",
            )
            if not found.passed:
                return Outcome(found.error, found.budget, False, found.note + advice)
    dtypes = {
        str(batch.rotary[kind][1].dtype).removeprefix("torch.") for batch in batches for kind in batch.rotary
    }
    held = {
        str(value.dtype).removeprefix("torch.")
        for name, value in model.named_buffers()
        if INV_FREQ.search(name)
    }
    method = next(iter(config.methods.values()))
    return Outcome(
        first.error,
        first.budget,
        True,
        f"{method.name}, rope_theta {method.rope_theta:,.0f}, up to position {_length(config) - 1:,}; inv_freq in "
        f"{' and '.join(sorted(held)) or 'no buffer'}, cos and sin in {' and '.join(sorted(dtypes)) or 'unknown'}",
    )


def _first_of_each(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct positions in ascending order, and where each first occurs."""
    first: dict[int, int] = {}
    for place, position in enumerate(positions.tolist()):
        first.setdefault(position, place)
    order = sorted(first)
    return torch.tensor(order), torch.tensor([first[each] for each in order])


def rope_saved(subject: Subject, folder: Any, config: ModelConfig) -> Outcome:
    """RoPE of the model that transformers loads from what the trainer saved."""
    if not (folder / "config.json").is_file():
        return Outcome.not_run(f"{subject.name} saved no config.json (adapters alone have none)")
    loaded = plain_model(folder, dtype=torch.float32)
    saved = ModelConfig.of(loaded.config)
    found = angles_outcome(
        {"saved and loaded": rope_now(loaded, saved if _length(saved) <= _length(config) else config)},
        config.methods,
        _far(saved if _length(saved) <= _length(config) else config)[1],
        min(_length(saved), _length(config)),
        "config",
    )
    if found.passed:
        return found
    return Outcome(
        found.error, found.budget, False, f"{found.note}; save the config with its complete rope_parameters"
    )


def windows(model: Any, batches: Sequence[MicroBatch], config: ModelConfig) -> Outcome:
    """How far each layer sees, against the config: a change of a document's first token reaches that many tokens."""
    layers = getattr(decoder_of(model).get_decoder(), "layers", None)
    if layers is None or len(layers) != len(config.layers):
        return Outcome.not_run(f"{type(model).__name__} has no list of decoder layers that fits its config")
    # Only a document longer than a window shows where the window ends.
    batch, row, document = max(
        (
            (batch, row, number)
            for batch in batches
            for row in range(len(batch.ids))
            for number in set(batch.owners[row].tolist()) - {OUTSIDE}
        ),
        key=lambda each: int((each[0].owners[each[1]] == each[2]).sum()),
    )
    cells = (batch.owners[row] == document).nonzero().flatten()
    base = _layer_outputs(model, layers, batch, None, 0, 0)
    again = _layer_outputs(model, layers, batch, None, 0, 0)
    wrong, unseen = [], []
    for number, layer in enumerate(config.layers):
        expected = len(cells) if layer.window is None else min(layer.window, len(cells))
        # A convolution reaches its kernel's width, which no config states as a window.
        if layer.kind == "conv" or not (layer.attends or layer.is_recurrent):
            continue
        if layer.window is not None and layer.window >= len(cells):
            unseen.append(layer.window)
        changed = _layer_outputs(model, layers, batch, number, row, int(cells[0]))[number]
        scale = base[number].float().abs().amax(-1).clamp_min(LEAST_SEEN)
        noise = float(((again[number] - base[number]).float().abs().amax(-1) / scale).max())
        reached = _moved(base[number], changed, 2 * noise)[row][cells]
        reach = int(reached.nonzero().max()) + 1 if reached.any() else 0
        if int(reached.sum()) != expected or reach != expected:
            wrong.append((number, reach, int(reached.sum()), layer.window))
    if wrong:
        number, reach, count, window = wrong[0]
        stated = "no window" if window is None else f"a window of {window}"
        seen = f"the whole document of {reach}" if reach == len(cells) == count else f"{count}"
        return Outcome(
            float(len(wrong)),
            0.0,
            False,
            f"a token of layer {number} reaches {seen} tokens, but the config states {stated}; "
            f"{len(wrong)} of {len(config.layers)} layers differ; build masks with the window of each layer",
        )
    if unseen:
        return Outcome.not_run(
            f"the longest document of {len(cells)} tokens is shorter than the window of {min(unseen)}; give --length "
            f"{min(unseen) + SHORT_OF}"
        )
    widths = Counter(layer.window for layer in config.layers)
    parts = [
        f"{count} with {'no window' if width is None else f'window {width}'}"
        for width, count in widths.items()
    ]
    text = ", ".join(parts)
    return Outcome(0.0, 0.0, True, f"layers: {text}; measured on a document of {len(cells)} tokens")


SHORT_OF = 8
"""Tokens that a document must have beyond a window."""


def _layer_outputs(
    model: Any, layers: Any, batch: MicroBatch, changed: int | None, row: int, column: int
) -> list[Tensor]:
    """Output of each layer; the input of layer ``changed`` is moved at one token."""
    outputs: list[Tensor] = []

    def nudge(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        size = hidden[row, column].float().square().mean().sqrt()
        # Not a constant: a LayerNorm would remove it.
        pattern = torch.cos(torch.arange(hidden.shape[-1], device=hidden.device))
        hidden[row, column] += (NUDGE * size * pattern).to(hidden.dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    if changed is not None:
        hooks.append(layers[changed].register_forward_pre_hook(nudge, with_kwargs=True))
    try:
        _run(model, batch, batch.ids)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def losses_apart(subject: Subject, documents: Documents, per_document: int, spare: int) -> Outcome:
    """For a loss function: no token moves the losses of another document."""
    assert subject.losses is not None
    base, again = subject.losses(documents), subject.losses(documents)
    moves = []
    for number, document in enumerate(documents):
        for (place,) in _spread([[place] for place in range(len(document))], per_document):
            # An id that no document has, so that the change cannot turn one document's text into another's.
            other = (*document[:place], spare, *document[place + 1 :])
            changed = subject.losses((*documents[:number], other, *documents[number + 1 :]))
            for moved, (before, repeat, after) in enumerate(zip(base, again, changed, strict=True)):
                rounding = ROUNDING * float(before.abs().max()) + 2 * float((repeat - before).abs().max())
                change = float((after - before).abs().max())
                if moved != number and change > rounding:
                    moves.append(Move(number, place, moved, change))
    return documents_apart(moves, True)
