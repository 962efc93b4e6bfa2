"""Whole runs on chats mixed with plain text: what is a target, kills, several processes, and evaluation beside them."""

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM

from ropewalk import RopewalkError
from ropewalk.attention.layout import IGNORED
from ropewalk.data import load_tokenizer, open_rows
from ropewalk.data.rows.training_rows import rows_for_step
from tests.training.resume_cases import recipe_of, weights_of
from tests.training.run_cases import cut_off_after, extend, extended
from tests.training.tiny import WORDS, save_tiny

CHATML = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
ROLES = ("user", "assistant")
THETA = 4e4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("chats") / "model", vocab_size=20)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens(list(ROLES))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """80 chats with long questions and short answers, and 80 plain documents."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("sources")

    def words(least, most):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    def turns():
        for number in range(2 * rng.randint(1, 2)):
            limits = (10, 20) if number % 2 == 0 else (1, 4)
            yield {"role": ROLES[number % 2], "content": words(*limits)}

    chats = [{"messages": list(turns())} for _ in range(80)]
    plain = [{"text": words(10, 60)} for _ in range(80)]
    for name, records in (("chats", chats), ("plain", plain)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return [
        {"path": str(folder / "chats.jsonl"), "messages_field": "messages"},
        {"path": str(folder / "plain.jsonl")},
    ]


@pytest.fixture
def values(model, sources, tmp_path):
    part = {
        "rows_per_step": 2,
        "learning_rate": 1e-2,
        "steps": 3,
        "rope": {"method": "theta", "rope_theta": THETA},
    }
    return {
        "model": str(model),
        "output": str(tmp_path / "run"),
        "data": {
            "sources": sources,
            "mixture": {"shares": {"chats": 0.5, "plain": 0.5}},
            "packing": "best_fit",
            "long_documents": "skip",
            "validation_documents": 20,
        },
        "stages": [
            {"context": 64, "pattern": "intra_document", **part},
            {"context": 128, "pattern": "anchor", **part},
        ],
        "checkpoints": {"every": 2, "keep": 1},
        "evaluation": {"suites": ["perplexity"], "rows": 2, "every": 2},
    }


def beside(values, tmp_path, name, **changed):
    return {**values, "output": str(tmp_path / name), **changed}


def steps_of(output):
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [(each["stage"], each["step"], each["loss"], each["trained_tokens"]) for each in lines]


def measured_in(output):
    return {path.name: path.read_bytes() for path in (Path(output) / "evaluation-during").iterdir()}


def rows_of(output, number):
    return open_rows(Path(output) / json.loads((Path(output) / "rows.json").read_text())["rows"][number])


def test_the_loss_is_the_mean_over_the_answers_and_plain_text(values, model):
    """Against plain transformers, a document at a time; the mean of the rows' means would be another number."""
    extend(recipe_of(values))
    rows = rows_of(values["output"], 0)
    config = AutoConfig.from_pretrained(model)
    config.rope_parameters["rope_theta"] = THETA
    plain = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float64).eval()
    tokenizer = load_tokenizer(str(model))
    sums, counts = [], []
    for index in rows_for_step(0, 2, len(rows), recipe_of(values).seed):
        packed, start = rows.packed(index), 0
        summed, count = 0.0, 0
        for length, source in zip(packed.segment_lengths, packed.sources, strict=True):
            ids = torch.tensor(packed.input_ids[start : start + length].tolist())
            start += length
            if not source:
                continue
            with torch.no_grad():
                losses = torch.nn.functional.cross_entropy(
                    plain(ids[None]).logits[0, :-1], ids[1:], reduction="none"
                )
            trained = [True] * (length - 1) if source == "plain" else answered(tokenizer, ids.tolist())[1:]
            summed += float(losses[torch.tensor(trained)].sum())
            count += sum(trained)
        sums.append(summed)
        counts.append(count)
    _, _, loss, targets = steps_of(values["output"])[0]
    assert targets == sum(counts)
    assert loss == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    mean_of_means = sum(each / count for each, count in zip(sums, counts, strict=True)) / 2
    assert loss != pytest.approx(mean_of_means, rel=1e-5)


def answered(tokenizer, ids):
    """Whether each token belongs to an answer, told from the tokens alone; the EOS after the last one does too."""
    said, found, inside = tokenizer.convert_ids_to_tokens(ids), [], False
    for number, token in enumerate(said):
        found.append(inside)
        if token == "<|im_end|>":
            inside = found[-1] and number == len(said) - 2
        elif number and (said[number - 1], token) == ("<|im_start|>", "assistant"):
            inside = True
    return found


def test_cut_off_and_resumed_the_bytes_are_the_same(values, tmp_path):
    whole = beside(values, tmp_path, "whole")
    summary = extend(recipe_of(whole))
    assert [each["n"] for each in summary["before"] + summary["after"]] == [2, 2]
    assert len(measured_in(whole["output"])) >= 4
    with cut_off_after(5):
        extend(recipe_of(values))
    extend(recipe_of(values), resume=True)
    for read in (steps_of, measured_in, weights_of):
        assert read(values["output"]) == read(whole["output"])


def test_a_step_whose_chats_were_cut_before_their_answers_is_refused_before_training(values, tmp_path):
    path = tmp_path / "long.jsonl"
    rng = random.Random(0)

    def chat(question, answer):
        said = zip(ROLES, (question, answer), strict=True)
        return {
            "messages": [{"role": role, "content": " ".join(rng.choices(WORDS, k=n))} for role, n in said]
        }

    chats = [chat(*lengths) for lengths in [(200, 1), (5, 20)] * 40]
    path.write_text("".join(json.dumps(each) + "\n" for each in chats))
    data = {
        **{key: value for key, value in values["data"].items() if key != "mixture"},
        "sources": [{"path": str(path), "messages_field": "messages"}],
        "long_documents": "truncate",
    }
    stage = {**values["stages"][0], "steps": 20, "rows_per_step": 1}
    cut = {**values, "data": data, "stages": [stage]}
    with pytest.raises(
        RopewalkError, match="no token to train on, because all documents in its rows were cut"
    ):
        extend(recipe_of(cut))
    assert not (Path(values["output"]) / "metrics.jsonl").exists()
    extend(recipe_of(beside(cut, tmp_path, "skipped", data={**data, "long_documents": "skip"})))


@pytest.mark.slow
def test_two_processes_train_as_one_does(values, tmp_path, two_ranks):
    """Each process has a row of its own, and the rows have different numbers of targets."""
    one, two = beside(values, tmp_path, "one"), beside(values, tmp_path, "two", parallel={"shard": 2})
    extend(recipe_of(one))
    two_ranks.run(extended, two)
    rows = rows_of(one["output"], 0)
    targets = [int((rows[index].labels != IGNORED).sum()) for index in range(len(rows))]
    assert len(set(targets)) > 1
    for found, expected in zip(steps_of(two["output"]), steps_of(one["output"]), strict=True):
        assert found[:2] + found[3:] == expected[:2] + expected[3:]
        assert found[2] == pytest.approx(expected[2], rel=1e-4)


def test_a_step_whose_documents_were_cut_before_their_spans_is_refused_before_training(values, tmp_path):
    path, words = tmp_path / "spans.jsonl", " ".join(random.Random(0).choices(WORDS, k=400))
    path.write_text(
        "".join(
            json.dumps({"text": f"{n} {words} end", "loss_spans": [[len(words), len(words) + 2]]}) + "\n"
            for n in range(400)
        )
    )
    data = {
        **{key: value for key, value in values["data"].items() if key != "mixture"},
        "sources": [{"path": str(path), "loss_spans_field": "loss_spans"}],
        "long_documents": "truncate",
    }
    stage = {**values["stages"][0], "steps": 2, "rows_per_step": 1}
    cut = {**values, "data": data, "stages": [stage]}
    with pytest.raises(
        RopewalkError, match="no token to train on, because all documents in its rows were cut"
    ):
        extend(recipe_of(cut))
    with pytest.raises(RopewalkError, match="packing sequential would cut documents with spans of loss"):
        extend(recipe_of(beside(cut, tmp_path, "cut", data={**data, "packing": "sequential"})))
