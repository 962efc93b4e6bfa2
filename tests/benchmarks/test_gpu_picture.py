"""The picture of the figures of a GPU."""

import json

from benchmarks.common import RESULTS
from benchmarks.gpu import main
from benchmarks.gpu_picture import figure
from tests.reporting.axes_cases import boxes, heading, lines, panels


def test_measured_figures_are_drawn_as_they_are(tmp_path):
    result = json.loads((RESULTS / "gpu_h200.json").read_text())
    drawn = figure(result)
    found = panels(drawn)
    assert [heading(panel)[0] if heading(panel) else "" for panel in found] == [
        "full attention",
        "documents of 2,048 tokens",
        "documents of 2,048 tokens and an anchor",
        "",
    ]
    rows = result["sections"]["attention"]["rows"]
    (row,) = (row for row in rows if row["way"] == "bare SDPA" and row["length"] == 131072)
    line = lines(found[0])["bare SDPA"]
    assert dict(zip(line.x, line.y, strict=True))[131072] == row["of_matmul_rate"]
    bars = [right for _, right, _, _ in boxes(found[3])]
    assert sorted(bars) == sorted(row["seconds"] for row in result["sections"]["step"]["rows"])
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(result))
    assert main(["--picture", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 0


def test_rows_without_figures_draw_nothing():
    rows = [{"length": 8192, "pattern": "full", "way": "ropewalk flex", "not_run": "no time left"}]
    assert figure({"sections": {"attention": {"rows": rows}}}) is None
    assert figure({"sections": {}}) is None
