"""The script that records what programs compute, with the transformers that is installed."""

import json

import pytest

from scripts import observe_readers as script


def test_an_observation_is_added_to_the_record(tmp_path, monkeypatch, capsys):
    record = tmp_path / "observed.json"
    record.write_text(json.dumps({"configs": {}, "observed": {"other": {}}}))
    monkeypatch.setattr(script, "RECORD", record)
    script.main(["transformers-4", "--key", "installed"])
    found = json.loads(record.read_text())
    assert found["configs"] == script.cases()
    assert set(found["observed"]) == {"other", "installed"}
    assert len(found["observed"]["installed"]) == len(script.cases())
    assert f"installed: {len(found['configs'])} configs" in capsys.readouterr().out


def test_unknown_programs_are_refused(capsys):
    with pytest.raises(SystemExit):
        script.main(["ollama"])
    assert "invalid choice" in capsys.readouterr().err
