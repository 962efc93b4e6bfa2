"""Figures are written whole or not at all, the same each time, and say what they must."""

import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult, default_bins
from ropewalk.reporting import passkey_figure, perplexity_figure, training_figure
from tests.reporting.reporting_cases import AFTER, BEFORE, passkey, perplexity


def said(svg: Path) -> list[str]:
    """matplotlib writes every text of a figure as a comment before its outlines."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_perplexity_figure_names_models_and_marks_the_trained_length(tmp_path: Path) -> None:
    svg = tmp_path / "new" / "perplexity.svg"
    perplexity_figure({"before": BEFORE, "after": AFTER}, svg, 512, "stories: costs $1 or $2")
    texts = said(svg)
    for text in ("before", "after", "trained length 512", "perplexity", "stories: costs $1 or $2"):
        assert text in texts
    for tick in ("512", "1k", "1.5k", "2k"):
        assert tick in texts
    # Told apart without colour: the first line is dashed.
    assert "stroke-dasharray: 7.4,3.2" in svg.read_text()
    assert [path.name for path in svg.parent.iterdir()] == ["perplexity.svg"]


def test_names_of_others_are_text_and_do_no_harm(tmp_path: Path) -> None:
    # The first is no formula that matplotlib can read, and the second would be drawn as one.
    names, svg = ("$^$ a\x1b[31m", "$x_1$ b\u202e", "c \udcff"), tmp_path / "names.svg"
    perplexity_figure(dict.fromkeys(names, BEFORE), svg, 512, "$^$ \x1b\udcff")
    passkey_figure({name: [passkey(512, 3)] for name in names}, tmp_path / "bars.svg", "$^$ \x1b\udcff")
    for path in (svg, tmp_path / "bars.svg"):
        texts = said(path)
        for text in ("$^$ a\\x1b[31m", "$x_1$ b\\u202e", "c \\udcff", "$^$ \\x1b\\udcff"):
            assert text in texts
        ElementTree.parse(path)


def test_same_results_give_the_same_file(tmp_path: Path) -> None:
    for suffix in ("png", "svg"):
        one, two = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
        for path in (one, two):
            perplexity_figure({"before": BEFORE, "after": AFTER}, path, 512, "x")
        assert one.read_bytes() == two.read_bytes()
    assert png_size(tmp_path / "1.png") == (1152, 672)


def test_single_model_has_no_legend_and_no_mark_beyond_the_rows(tmp_path: Path) -> None:
    svg = tmp_path / "one.svg"
    perplexity_figure({"model": BEFORE}, svg, 8192)
    assert "model" not in said(svg)
    assert not any(text.startswith("trained") for text in said(svg))


def test_wide_ranges_are_logarithmic(tmp_path: Path) -> None:
    edges = default_bins(2**20, 8192)
    wide = perplexity([5.0 * 4**n for n in range(8)], edges)
    svg = tmp_path / "wide.svg"
    perplexity_figure({"before": wide}, svg, 8192)
    texts = said(svg)
    for tick in ("10", "100", "1,000", "10,000", "8k", "16k", "512k", "1M"):
        assert tick in texts


def test_gaps_are_drawn_as_gaps(tmp_path: Path) -> None:
    perplexity_figure({"a": perplexity([2.0, float("nan"), float("inf"), 3.0])}, tmp_path / "gaps.png")
    with pytest.raises(RopewalkError, match="no finite perplexity"):
        perplexity_figure({"a": perplexity([float("nan")] * 4)}, tmp_path / "none.png")
    with pytest.raises(RopewalkError, match="no finite perplexity"):
        perplexity_figure({}, tmp_path / "none.png")


def test_passkey_figure_says_what_was_not_run(tmp_path: Path) -> None:
    skipped = TaskResult.not_run("passkey", "passkey", 2048, "too long")
    series = {
        "before": [passkey(512, 20), passkey(2048, 0), passkey(1024, 3)],
        "after": [passkey(512, 20), skipped],
    }
    svg = tmp_path / "passkey.svg"
    passkey_figure(series, svg, "Passkey")
    texts = said(svg)
    assert texts.count("not run") == 1
    for text in ("before", "after", "512", "1k", "2k", "Passkey"):
        assert text in texts
    passkey_figure({"model": [passkey(512, 7)]}, tmp_path / "one.png")
    nowhere = TaskResult.not_run("passkey", "passkey", None, "no chat template")
    long = replace(passkey(512, 3), length=None)
    passkey_figure({"model": [passkey(512, 7), nowhere, long]}, tmp_path / "same.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "same.png").read_bytes()
    with pytest.raises(RopewalkError, match="no passkey score"):
        passkey_figure({"model": [skipped]}, tmp_path / "none.png")


def test_passkey_bars_are_as_high_as_the_scores_in_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr("ropewalk.reporting.figures.save_figure", lambda figure, _: kept.append(figure))
    passkey_figure({"model": [passkey(512, 7), passkey(1024, 20)]}, tmp_path / "one.png")
    (axes,) = kept[0].axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([35, 100])
    low, high = passkey(512, 7).ci95
    (errors,) = axes.collections
    assert errors.get_segments()[0][:, 1].tolist() == pytest.approx([low, high])


def test_training_figure_marks_stages_and_smooths_many_steps(tmp_path: Path) -> None:
    metrics = [{"loss": 3 - n / 100, "stage": n // 40, "seen": n * 2048} for n in range(80)]
    metrics[7]["loss"] = None
    svg = tmp_path / "training.svg"
    training_figure(metrics, svg, "Training", x_key="seen")
    assert {"seen", "mean of 5", "each step"} <= set(said(svg))
    training_figure(metrics[:5], svg)
    assert "optimiser step" in said(svg)
    assert "each step" not in said(svg)
    with pytest.raises(RopewalkError, match="no finite training loss"):
        training_figure([{"loss": None}], svg)


def test_bad_paths_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"\.png or \.svg, got a\.pdf"):
        perplexity_figure({"a": BEFORE}, tmp_path / "a.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(RopewalkError, match="cannot write"):
        perplexity_figure({"a": BEFORE}, tmp_path / "file" / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_drawing_leaves_global_state_and_torch_alone() -> None:
    code = (
        "import sys; from ropewalk.reporting import perplexity_figure, result_tables, write_page;"
        "assert 'matplotlib.pyplot' not in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
