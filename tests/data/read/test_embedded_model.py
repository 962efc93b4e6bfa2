"""The embedded demo checkpoint: loads with plain transformers, is small, and has learned what it claims."""

import json
import math
import random
from collections import Counter, defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropewalk.data.read.embedded import demo_model_path, embedded_documents

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PASSKEY_PARTS = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.",
    "The pass key is {key}. Remember it. {key} is the pass key.",
    "What is the pass key? The pass key is",
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), local_files_only=True).eval()


@pytest.fixture(scope="module")
def validation_rows(tokenizer, model):
    """Rows of one full context, ``<s>`` first, spread evenly over the validation split."""
    ids = []
    for document in embedded_documents("validation"):
        ids += [*tokenizer.encode(document.text), tokenizer.eos_token_id]
    length = model.config.max_position_embeddings - 1
    starts = range(0, len(ids) - length, (len(ids) - length) // 64)
    return torch.tensor([[tokenizer.bos_token_id, *ids[start : start + length]] for start in starts])


def test_folder_is_plain_and_small():
    folder = demo_model_path()
    assert (folder / "model.safetensors").stat().st_size <= 4_000_000
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }


def test_training_facts_describe_the_checkpoint(model):
    facts = json.loads((demo_model_path() / "training.json").read_text())
    assert facts["parameters"] == model.num_parameters()
    assert facts["step"] == facts["planned_steps"]


def test_configuration_is_a_short_default_rope_llama(model):
    config = model.config
    assert config.model_type == "llama"
    assert config.max_position_embeddings == 256
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rope_parameters["rope_theta"] == 10_000
    assert config.tie_word_embeddings
    assert config.head_dim == 32
    assert config.num_attention_heads > config.num_key_value_heads


def test_tokenizer_and_model_agree_on_special_tokens(tokenizer, model):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    for config in (model.config, model.generation_config):
        assert config.bos_token_id == tokenizer.bos_token_id
        assert config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer("def f(): pass").input_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x ** 2\n", "naïve 漢字 🙂\t\r\n", "  two  spaces ", "1e-5"]
)
def test_tokenizer_round_trips_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_digits_are_single_tokens(tokenizer):
    ids = tokenizer.encode(" 40913", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["Ġ", "4", "0", "9", "1", "3"]


@pytest.fixture(scope="module")
def validation_logits(model, validation_rows):
    with torch.no_grad():
        return model(input_ids=validation_rows[:, :-1]).logits


def test_validation_loss_is_far_below_unigram_and_uniform(model, validation_rows, validation_logits):
    logits = validation_logits
    targets = validation_rows[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).item()

    vocab_size = model.config.vocab_size
    counts = Counter(targets.tolist())  # the targets' own counts: a unigram model that has seen the answers
    unigram = -sum(n * math.log(n / len(targets)) for n in counts.values()) / len(targets)
    assert loss < math.log(vocab_size) - 2
    assert loss < unigram - 1.5


def test_context_helps_inside_the_trained_length(validation_rows, validation_logits):
    losses = torch.nn.functional.cross_entropy(
        validation_logits.transpose(1, 2), validation_rows[:, 1:], reduction="none"
    )
    assert losses[:, 128:].mean() < losses[:, :32].mean()


@torch.no_grad()
def test_finds_a_passkey_inside_the_trained_length(tokenizer, model):
    rng = random.Random(7)
    task, needle, question = PASSKEY_PARTS
    samples = 40
    # By their number of tokens: prompts of one length are answered in one batch.
    asked = defaultdict(list)
    for _ in range(samples):
        key = rng.randint(1, 50_000)
        before, after = rng.choice([(0, 5), (1, 4), (2, 3), (3, 2), (4, 1), (5, 0)])
        parts = [
            task,
            " ".join([NOISE] * before),
            needle.format(key=key),
            " ".join([NOISE] * after),
            question,
        ]
        prompt = tokenizer("\n".join(parts), return_tensors="pt").input_ids
        assert prompt.shape[1] + 10 <= model.config.max_position_embeddings
        asked[prompt.shape[1]].append((prompt, key))
    right = 0
    for length, group in asked.items():
        prompts = torch.cat([prompt for prompt, _ in group])
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=10,
            do_sample=False,
            pad_token_id=1,
        )
        answers = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        right += sum(answer.strip() == str(key) for answer, (_, key) in zip(answers, group, strict=True))
    assert right >= 0.9 * samples
