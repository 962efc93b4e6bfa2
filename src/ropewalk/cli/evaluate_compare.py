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
    from ropewalk.evaluation.comparison import compare
    from ropewalk.evaluation.record import read_record

    (record_a, results_a), (record_b, results_b) = read_record(a), read_record(b)
    differences = compare(results_a, results_b, seed)
    if plot is not None:
        from ropewalk.reporting import difference_figure, draw

        draw(difference_figure(differences, f"{b.name} against {a.name}"), plot)
    if as_json:
        sides = {
            name: {"path": str(path), "model": record["model"]}
            for name, path, record in (("a", a, record_a), ("b", b, record_b))
        }
        print_json({**sides, "seed": seed, "differences": [each.to_json() for each in differences]})
        return
    from ropewalk.reporting import comparison_table

    results().say(f"A {record_a['model']} ({a})")
    results().say(f"B {record_b['model']} ({b})")
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
    from ropewalk.cli.evaluate_output import show, write
    from ropewalk.cli.evaluate_run import Output
    from ropewalk.evaluation.record import rescore

    record, found = rescore(folder)
    write(folder, record, found)
    show(record, found, Output(folder, None, as_json))
