"""``ropewalk eval compare`` and ``ropewalk eval rescore``: what needs results and no model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.options import JsonFlag, PlotFile
from ropewalk.cli.output import print_json, print_whole, results
from ropewalk.io.settings import FilePath, Seed


def compare_command(
    a: Annotated[FilePath, Field(description="Folder of a finished evaluation.")],
    b: Annotated[FilePath, Field(description="Another one, on the same samples.")],
    *,
    seed: Annotated[Seed, Field(description="Random seed of the permutation test.")] = 0,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell which differences between two evaluations are more than chance: B against A, paired by sample."""
    from ropewalk.evaluation.record import compare_folders

    result = compare_folders(a, b, seed)
    differences = result.differences
    if plot is not None:
        from ropewalk.reporting import difference_figure, draw

        draw(difference_figure(differences, f"{b.name} against {a.name}"), plot)
    if as_json:
        print_json(result.to_json())
        return
    from ropewalk.reporting import comparison_table

    results().say(f"A {result.a['model']} ({a})")
    results().say(f"B {result.b['model']} ({b})")
    results().print()
    print_whole(comparison_table(differences).rich())
    real = [each for each in differences if each.real]
    tested = sum(each.reason is None for each in differences)
    results().print(
        f"\n{len(real)} of {tested} differences are more than chance "
        "(paired by sample; 5 % over all of them together, after Holm)",
        soft_wrap=True,
    )


def rescore_command(
    folder: Annotated[FilePath, Field(description="Folder of a finished evaluation.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Judge the stored predictions again, without a model, and write results, figures and page anew."""
    from ropewalk.cli.evaluate_output import draw, show
    from ropewalk.evaluation.record import rescore

    result = rescore(folder)
    # The record last, so that where it stands the figures and the page do.
    draw(folder, result)
    result.write(folder)
    show(result, folder, as_json)
