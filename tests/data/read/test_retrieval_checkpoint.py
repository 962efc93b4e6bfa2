"""The embedded retrieval checkpoint: small, plain, and able to do what it is for."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropewalk.data.read.embedded import RETRIEVAL, resolve_model, retrieval_model_path
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.evaluation.tasks.ruler.tasks import RULER

TASKS = {
    "passkey": PasskeyTask(),
    **{name: RULER[name] for name in ("niah_single_1", "niah_multikey_2", "vt")},
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model(RETRIEVAL), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(resolve_model(RETRIEVAL), local_files_only=True).eval()


def test_folder_is_plain_and_small(model, tokenizer):
    folder = retrieval_model_path()
    assert (folder / "model.safetensors").stat().st_size <= 5_000_000
    assert json.loads((folder / "training.json").read_text())["parameters"] == model.num_parameters()
    assert model.config.max_position_embeddings == 256
    assert model.config.rope_parameters["rope_theta"] == 10_000
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("name", TASKS)
def test_finds_what_is_hidden_within_the_trained_length(model, tokenizer, name):
    """Teacher-forced: the share of answers' tokens that are the likeliest, over 16 samples."""
    right = total = 0
    for sample in TASKS[name].samples(PromptEncoder(tokenizer), 256, 16, seed=5):
        prompt = tokenizer.encode(sample.text + sample.answer_prefix)
        answer = "".join(f" {reference}" for reference in sample.references)
        ids = [*prompt, *tokenizer.encode(answer, add_special_tokens=False)]
        with torch.no_grad():
            likeliest = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        expected = ids[len(prompt) :]
        right += sum(a == b for a, b in zip(likeliest[len(prompt) - 1 : -1], expected, strict=True))
        total += len(expected)
    assert right >= 0.9 * total


def test_an_unknown_embedded_model_is_refused_by_name():
    with pytest.raises(
        RopewalkError, match=r"no embedded model 'embedded:nothing'; choose embedded or embedded:retrieval"
    ):
        resolve_model("embedded:nothing")
