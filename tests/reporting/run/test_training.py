"""How a run is shown: its results before and after, and a report of nothing but a finished run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult
from ropewalk.evaluation.score_rows import score_rows
from ropewalk.reporting.figures import drawing
from ropewalk.reporting.run.before_after import conclusion, run_differences, run_results
from ropewalk.reporting.run.training import describe_run, draw_passkey, run_tables, write_run_report
from ropewalk.training.folder import REPORT, SUMMARY
from tests.reporting.reporting_cases import AFTER, BEFORE, passkey

SUMMARY_VALUES = {
    "before": [BEFORE.to_json(), passkey(1024, 12).to_json()],
    "after": [AFTER.to_json(), passkey(1024, 20).to_json()],
}


def test_results_of_a_summary_are_those_that_were_measured():
    found = run_results(SUMMARY_VALUES)
    assert found == {"before": [BEFORE, passkey(1024, 12)], "after": [AFTER, passkey(1024, 20)]}


def test_tables_hold_both_sides():
    cells = {cell for table in run_tables(SUMMARY_VALUES) for row in table.rows for cell in row}
    text = " ".join(cells)
    for value in ("2.64", "2.45"):
        assert value in text
    headers = {name for table in run_tables(SUMMARY_VALUES) for name in table.header}
    assert any("before" in name for name in headers | cells)
    assert any("after" in name for name in headers | cells)


def test_the_sentence_of_the_page_is_printed_between_tables_and_files(tmp_path):
    nothing = dict.fromkeys(("adapter", "short_context", "softmax_scale", "exported", "files", "readers"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    result = SimpleNamespace(
        to_json=lambda: SUMMARY_VALUES,
        trained_length=256,
        context=1024,
        model=tmp_path,
        output=tmp_path,
        **nothing,
    )
    parts = list(describe_run(result))
    sentence = conclusion(256, 1024, run_differences(SUMMARY_VALUES))
    assert "from 256 to 1,024 tokens" in sentence
    place = parts.index(sentence)
    assert all(not isinstance(part, str) or part == "" for part in parts[:place])
    assert parts[place + 2].startswith("model")
    assert any("AutoModelForImageTextToText.from_pretrained(" in str(part) for part in parts[place:])


def test_a_run_that_is_not_finished_has_no_report(tmp_path):
    with pytest.raises(RopewalkError, match=r"is not the folder of a finished run: it has no summary\.json"):
        write_run_report(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"trained_length": NaN}'])
def test_a_damaged_summary_says_what_to_do(tmp_path, text):
    (tmp_path / SUMMARY).write_text(text)
    with pytest.raises(
        RopewalkError, match=r"is damaged \(.*\); delete this file, and --resume will write it again"
    ):
        write_run_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SUMMARY]


def test_passkey_scores_are_drawn_by_task_and_what_did_not_run_is_not(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(drawing, "draw_for_page", lambda figure, path: drawn.update({path.name: figure}))
    not_run = TaskResult.not_run("passkey", "teacher_forced", 512, "no tokenizer")
    generated = [passkey(512, 20), passkey(1024, 3)]
    given = {"before": [*generated, not_run], "after": [passkey(512, 20)]}
    draw_passkey(score_rows(given), 512, tmp_path)
    assert list(drawn) == ["passkey.png"]
    assert drawn["passkey.png"].alternative() == (
        "Passkey retrieval. before: 100 % at 512 tokens, 15 % at 1k tokens; after: 100 % at 512 tokens."
    )
    forced = [replace(each, task="teacher_forced") for each in generated]
    draw_passkey(score_rows({"before": forced, "after": forced}), 512, tmp_path)
    assert list(drawn) == ["passkey.png", "passkey-teacher_forced.png"]
    assert set(drawn) <= set(REPORT)
