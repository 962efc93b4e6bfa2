"""A tiny checkpoint with its tokenizer and a few documents, made in a second."""

import json
import random
import shutil

import pytest

from tests.training.resume_cases import recipe_of
from tests.training.run_cases import extend
from tests.training.tiny import WORDS, save_tiny


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A random Llama of 32 tokens' context with a vocabulary of 16 words."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory):
    """A random Mixtral like the Llama, with four experts, two a token."""
    folder = tmp_path_factory.mktemp("tiny") / "mixtral"
    return save_tiny(folder, "Mixtral", num_local_experts=4, router_aux_loss_coef=0.02)


@pytest.fixture(scope="session")
def tiny_documents(tmp_path_factory):
    """120 documents of 5 to 60 words in which each word follows from the one before."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    with path.open("w") as file:
        for _ in range(120):
            start, stride = rng.randrange(12), rng.choice([1, 5])
            words = [WORDS[(start + stride * i) % 12] for i in range(rng.randint(5, 60))]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


@pytest.fixture
def recipe_values(tiny_checkpoint, tiny_documents, tmp_path):
    """A recipe of one short stage, as plain values to change."""
    return {
        "model": str(tiny_checkpoint),
        "output": str(tmp_path / "run"),
        "data": {"sources": [str(tiny_documents)], "validation_documents": 20},
        "stages": [
            {"context": 128, "steps": 6, "rows_per_step": 2, "learning_rate": 1e-2, "pattern": "anchor"}
        ],
        "checkpoints": {"every": 2, "keep": 2},
        "evaluation": {"suites": ["perplexity"], "rows": 2},
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory, tiny_checkpoint, tiny_documents):
    """A finished run of one stage, to be copied, and its recipe."""
    folder = tmp_path_factory.mktemp("done")
    documents = folder / "documents.jsonl"
    shutil.copy(tiny_documents, documents)
    values = {
        "model": str(tiny_checkpoint),
        "output": str(folder / "run"),
        "data": {"sources": [str(documents)], "validation_documents": 20},
        "stages": [{"context": 64, "steps": 4, "rows_per_step": 2, "learning_rate": 1e-2, "pattern": "full"}],
        "checkpoints": {"every": 2, "keep": 2},
        "evaluation": {"suites": ["perplexity"], "rows": 2},
    }
    return values, extend(recipe_of(values))


@pytest.fixture
def finished(done, tmp_path):
    """A copy of the finished run, as its recipe names it."""
    values, summary = done
    output = shutil.copytree(values["output"], tmp_path / "run")
    return {**values, "output": str(output)}, summary


@pytest.fixture
def cut(done, tmp_path):
    """A copy as if it had been killed after its second step."""
    values, _ = done
    output = shutil.copytree(values["output"], tmp_path / "cut")
    shutil.rmtree(output / "checkpoints" / "stage0-step000004")
    for name in ("model", "summary.json", "evaluation-after.json"):
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {**values, "output": str(output)}
