"""The picture of the figures of a GPU."""

import json

from benchmarks.common import RESULTS
from benchmarks.gpu import main
from benchmarks.gpu_picture import figure


def test_measured_figures_are_drawn_as_they_are(tmp_path):
    result = json.loads((RESULTS / "gpu_h200.json").read_text())
    drawn = figure(result)
    assert [panel.heading[0] if panel.heading else "" for panel in drawn.panels] == [
        "full attention",
        "documents of 2,048 tokens",
        "documents of 2,048 tokens and an anchor",
        "",
    ]
    lines = {line.name: dict(zip(line.x, line.y, strict=True)) for line in drawn.panels[0].marks}
    rows = result["sections"]["attention"]["rows"]
    (row,) = (row for row in rows if row["way"] == "bare SDPA" and row["length"] == 131072)
    assert lines["bare SDPA"][131072] == row["of_matmul_rate"]
    bars = [value for mark in drawn.panels[3].marks if hasattr(mark, "right") for value in mark.right]
    assert sorted(bars) == sorted(row["seconds"] for row in result["sections"]["step"]["rows"])
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(result))
    assert main(["--picture", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 0


def test_rows_without_figures_draw_nothing():
    rows = [{"length": 8192, "pattern": "full", "way": "ropewalk flex", "not_run": "no time left"}]
    assert figure({"sections": {"attention": {"rows": rows}}}) is None
    assert figure({"sections": {}}) is None
