"""The pictures of ``ropewalk rope``: what each command's ``--plot`` draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk.cli.output import searching

SHORTEST_DRAWN = 1024


def draw_bound(rotary_dim: int, bounds: Mapping[float, int | None], plot: Path) -> None:
    """B(m) above the attention upper bound: the two are read together."""
    import numpy as np

    from ropewalk.reporting import draw
    from ropewalk.reporting.figures.rope import decay_figure, margin_figure
    from ropewalk.rope.theory import attention_upper_bound, inv_freq_of_base, similarity_margin

    reached = [bound for bound in bounds.values() if bound is not None]
    longest = min(max([4096, *(4 * bound for bound in reached)]), 2**20)
    every = np.arange(longest + 1)
    named = {
        f"base {base:,.10g}": (inv_freq_of_base(rotary_dim, base), bound) for base, bound in bounds.items()
    }
    margins = {n: (every, similarity_margin(f, every), b) for n, (f, b) in named.items()}
    draw(margin_figure(margins), plot)
    some = np.unique(np.geomspace(1, longest, 2000).astype(int))
    bounds_by_name = {n: (some, attention_upper_bound(f, some)) for n, (f, _) in named.items()}
    draw(decay_figure(bounds_by_name), decay_path(plot))


def decay_path(plot: Path) -> Path:
    """Where the second picture of ``rope bound`` goes."""
    return plot.with_stem(f"{plot.stem}-decay")


def draw_bases(length: int, rotary_dim: int, ceiling: float, found: Any, plot: Path) -> None:
    """Feasible bases of this length and its halves, down to the shortest that is drawn."""
    from ropewalk.reporting import draw
    from ropewalk.reporting.figures.rope import feasible_bases_figure
    from ropewalk.rope.theory import feasible_bases
    from ropewalk.rope.theory.published import LOWER_BOUNDS, LOWER_BOUNDS_DIM

    lengths = [length]
    while lengths[0] >= 2 * SHORTEST_DRAWN:
        lengths.insert(0, lengths[0] // 2)
    maps = []
    with searching("picture", len(lengths)) as progress:
        for done, each in enumerate(lengths):
            progress(done, len(lengths))
            maps.append(found if each == length else feasible_bases(each, rotary_dim, ceiling))
    published = LOWER_BOUNDS if rotary_dim == LOWER_BOUNDS_DIM else {}
    figure = feasible_bases_figure(
        lengths,
        [each.feasible for each in maps],
        [each.safe_base for each in maps],
        {each: published[each] for each in lengths if each in published},
        ceiling,
        title=f"RoPE bases that reach a context length (rotary_dim {rotary_dim})",
    )
    draw(figure, plot)


def draw_theta(before: Any, after: Any, trained: int, target: int, plot: Path) -> None:
    """Where the slowest pair turns to under the old base and under the new one."""
    import numpy as np

    from ropewalk.reporting import draw
    from ropewalk.reporting.figures.rope import slowest_pair_figure
    from ropewalk.rope.theory import slowest_angles

    positions = np.linspace(0, target, 1000)
    series = {
        f"base {method.rope_theta:,.10g}": (
            positions,
            slowest_angles(method.frequencies().inv_freq, positions),
        )
        for method in (before, after)
    }
    draw(slowest_pair_figure(series, trained, target), plot)


def draw_periods(before: Any, after: Any, trained: int, target: int, plot: Path) -> None:
    """The period of each pair, as trained and for the target."""
    import numpy as np

    from ropewalk.reporting import draw
    from ropewalk.reporting.figures.rope import periods_figure

    series = {
        "as trained": 2 * np.pi / before.frequencies(trained).inv_freq.numpy(),
        f"{after.name} for the target": 2 * np.pi / after.frequencies(target).inv_freq.numpy(),
    }
    draw(periods_figure(series, trained, target), plot)
