"""The script that trains the embedded model, for one step on a few documents."""

from functools import partial
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from scripts import train_demo_model as script

# Identifiers for the rows of assignments, and text for several rows of validation.
DOCUMENTS = [
    SimpleNamespace(text=f"def function_{n}(argument):\n    return argument + {n}\n" * 20) for n in range(10)
]


@pytest.mark.slow
def test_a_step_writes_a_folder_that_transformers_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "embedded_documents", lambda split: DOCUMENTS)
    monkeypatch.setattr(script, "BATCH_ROWS", 2)
    monkeypatch.setattr(script, "passkey_accuracy", partial(script.passkey_accuracy, samples=2))
    script.main(["--out", str(tmp_path / "model"), "--steps", "1"])
    assert "validation loss" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert model.config.max_position_embeddings == script.CONTEXT
