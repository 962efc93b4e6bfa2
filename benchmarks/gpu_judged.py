"""What the figures of ``python -m benchmarks.gpu`` are held to: bounds, what was found, and whether it was met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

FLASH = "ropewalk varlen"
BARE = "bare SDPA"
LONG, SHORT = 131072, 32768
MEAN, SHORT_MEAN = 2048, 512
SAME = 1.03
"""Times within three per cent are the same: ``auto`` need not tell them apart."""

SWITCHES = ("compile", "offload_activations", "keep_attention", "tiled_mlp", "offload_optimizer")
"""Settings that a judged step leaves as they are by default."""

Row = Mapping[str, Any]


class Bound(NamedTuple):
    """A figure that has a bound; it is None where a row that it needs was not run.

    Attributes:
        what: what is bounded, in words.
        bound: largest value, or smallest if ``at_least``.
        found: computes it from the rows of ``attention`` and ``step``.
        at_least: whether the bound is a lower one.
    """

    what: str
    bound: float
    found: Callable[[Sequence[Row], Sequence[Row]], float | None]
    at_least: bool = False


def judged(sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each bound with what was found, and ``met``, ``not met`` or ``not run``."""
    attention, step = (sections.get(name, {}).get("rows", []) for name in ("attention", "step"))
    result = []
    for each in BOUNDS:
        found = each.found(attention, step)
        if found is None:
            verdict = "not run"
        else:
            met = found >= each.bound if each.at_least else found <= each.bound
            verdict = "met" if met else "not met"
        result.append({"what": each.what, "bound": each.bound, "found": found, "verdict": verdict})
    return result


def value(rows: Iterable[Row], key: str, **wanted: Any) -> float | None:
    """The figure of the row with these values; None if there is none."""
    found = [row for row in rows if key in row and all(row.get(name) == at for name, at in wanted.items())]
    return float(found[0][key]) if found else None


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def anchor_pair(
    attention: Sequence[Row], length: int, mean: int, way: str | None = None
) -> tuple[float | None, float | None]:
    """Milliseconds with the anchor and without, of one way, or of the package's that is fastest without."""
    at = {"length": length, "mean_document": mean}
    bare = [row for row in shape_rows(attention, pattern="intra_document", **at) if way in (None, row["way"])]
    if not bare:
        return None, None
    fastest = min(bare, key=lambda row: float(row["ms"]))
    return value(attention, "ms", pattern="anchor", way=fastest["way"], **at), float(fastest["ms"])


def shape_rows(attention: Iterable[Row], **shape: Any) -> list[Row]:
    """Rows of the package's own ways with a time."""
    return [
        row
        for row in attention
        if row["way"].startswith("ropewalk") and "ms" in row and all(row[k] == v for k, v in shape.items())
    ]


def anchor_ms(attention: Sequence[Row], step: Sequence[Row]) -> float | None:
    anchor, bare = anchor_pair(attention, LONG, MEAN)
    return None if anchor is None or bare is None else anchor - bare


def anchor_over_short(attention: Sequence[Row], step: Sequence[Row]) -> float | None:
    """The worse of two lengths."""
    found = [ratio(*anchor_pair(attention, length, SHORT_MEAN)) for length in (SHORT, LONG)]
    return max((each for each in found if each is not None), default=None)


def full_over_sdpa(attention: Sequence[Row], step: Sequence[Row]) -> float | None:
    """The worst length, for the engine that ``auto`` takes there."""
    found = []
    for row in attention:
        if row["pattern"] == "full" and "taken" in row:
            at = {"length": row["length"], "pattern": "full"}
            ours = value(attention, "ms", way=row["taken"], **at)
            found.append(ratio(ours, value(attention, "ms", way=BARE, **at)))
    known = [each for each in found if each is not None]
    return max(known, default=None)


def share_well_chosen(attention: Sequence[Row], step: Sequence[Row]) -> float | None:
    """Share of shapes in which ``auto`` takes the fastest engine, or one as fast."""
    right = []
    for row in attention:
        if "taken" not in row:
            continue
        shape = {name: row[name] for name in ("length", "mean_document", "pattern")}
        times = {each["way"]: float(each["ms"]) for each in shape_rows(attention, **shape)}
        chosen = times.get(row["taken"])
        if chosen is not None and len(times) > 1:
            right.append(chosen <= SAME * min(times.values()))
    return sum(right) / len(right) if right else None


def seconds(step: Sequence[Row], **wanted: Any) -> float | None:
    named = {"model": "1B", "way": "ropewalk", "gradient_checkpointing": True}
    return value(unswitched(step), "seconds", **{**named, **wanted})


def unswitched(step: Iterable[Row]) -> list[Row]:
    return [row for row in step if not row.keys() & set(SWITCHES)]


def long_anchor_over_full(attention: Sequence[Row], step: Sequence[Row]) -> float | None:
    return ratio(*(seconds(step, length=LONG, pattern=each) for each in ("anchor", "full")))


def worst_over_plain(attention: Sequence[Row], step: Sequence[Row]) -> float | None:
    """Our slowest step beside the plain loop of the same model, length and checkpointing."""
    found = []
    for row in unswitched(step):
        if row["way"] == "ropewalk" and "seconds" in row:
            same = {name: row[name] for name in ("model", "length", "gradient_checkpointing")}
            plain = value(step, "seconds", way="plain transformers", **same)
            found.append(ratio(float(row["seconds"]), plain))
    return max((each for each in found if each is not None), default=None)


BOUNDS = (
    Bound("ms a layer that the anchor adds to the fastest kernel, 128K, documents of 2,048", 3, anchor_ms),
    Bound(
        "anchor over FlashAttention without it, 128K, documents of 2,048",
        1.05,
        lambda attention, step: ratio(*anchor_pair(attention, LONG, MEAN, FLASH)),
    ),
    Bound(
        "anchor over the fastest kernel without it, 128K, documents of 2,048",
        1.08,
        lambda attention, step: ratio(*anchor_pair(attention, LONG, MEAN)),
    ),
    Bound(
        "anchor over the fastest kernel without it, 32K or 128K, documents of 512", 1.10, anchor_over_short
    ),
    Bound("full attention over bare SDPA, the worst length", SAME, full_over_sdpa),
    Bound("share of shapes whose fastest kernel auto takes", 0.9, share_well_chosen, at_least=True),
    Bound(
        "seconds of a step of 1B, 32K, anchor, with checkpointing",
        0.80,
        lambda attention, step: seconds(step, length=SHORT, pattern="anchor"),
    ),
    Bound(
        "seconds of a step of 1B, 32K, anchor, without checkpointing",
        0.65,
        lambda attention, step: seconds(step, length=SHORT, pattern="anchor", gradient_checkpointing=False),
    ),
    Bound("step of 1B, 128K: anchor over full", 0.45, long_anchor_over_full),
    Bound("our slowest step over the plain loop's", 1.0, worst_over_plain),
)
