import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import evaluate_model
from ropewalk.evaluation.backends.sharded import ShardedBackend
from ropewalk.evaluation.model_under_test import ModelUnderTest
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.statistics import (
    mean_score_interval,
    ratio_interval,
    score_interval,
    wilson_interval,
)
from ropewalk.evaluation.tasks.lm_eval import suites as module
from ropewalk.evaluation.tasks.lm_eval.suites import RetentionSettings, check_retention, retention
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.reporting import evaluation_tables
from ropewalk.rope import Yarn
from tests.harness_cases import DATA, Parrot, harness_model, harness_tokenizer
from tests.places import ROOT

pytest.importorskip("lm_eval")

HELLASWAG = RetentionSettings(
    "short", ("hellaswag",), {"hellaswag": DATA / "hellaswag"}, num_fewshot=0, batch_size=3
)
ARC = RetentionSettings("short", ("arc_challenge",), {"arc": DATA / "arc"}, num_fewshot=2)
MMLU = RetentionSettings("short", ("mmlu",), {"mmlu": DATA / "mmlu"}, num_fewshot=5)
TRUTHFULQA = RetentionSettings("short", ("truthfulqa_mc2",), {"truthfulqa": DATA / "truthfulqa.jsonl"})


@pytest.fixture(scope="module")
def tokenizer():
    return harness_tokenizer()


@pytest.fixture(scope="module")
def model():
    return harness_model()


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def write_rows(path: Path, values) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def log_likelihood(model, tokenizer, prompt, answer):
    """Nothing but the model and a tokenizer of bytes: no lm_eval, no batch."""
    ids = tokenizer(prompt + answer, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        losses = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    length = len(answer.encode())
    return sum(float(losses[-length:][place, ids[0, -length + place]]) for place in range(length))


def hellaswag_prompt(row):
    """By the published preprocessing, for rows without its [title] marks in the context."""
    return f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"


def hellaswag_endings(row):
    return [ending.replace("[brackets] ", "").replace("[brackets]", "") for ending in row["endings"]]


def told_hellaswag():
    return [
        f"{hellaswag_prompt(r)} {hellaswag_endings(r)[int(r['label'])]}"
        for r in rows("hellaswag/hellaswag_val.jsonl")
    ]


def test_hellaswag_equals_likelihoods_without_lm_eval(model, tokenizer):
    (result,) = retention(model, tokenizer, HELLASWAG)
    normed, plain = [], []
    for row in rows("hellaswag/hellaswag_val.jsonl"):
        endings = hellaswag_endings(row)
        found = [log_likelihood(model, tokenizer, hellaswag_prompt(row), f" {each}") for each in endings]
        best = np.argmax([f / len(e) for f, e in zip(found, endings, strict=True)])
        normed.append(100.0 * (best == int(row["label"])))
        plain.append(float(np.argmax(found) == int(row["label"])))
    assert [sample["score"] for sample in result.samples] == normed
    assert [sample["index"] for sample in result.samples] == [0, 1, 2, 3]
    assert result.score == np.mean(normed)
    assert result.details["metrics"] == {"acc": np.mean(plain), "acc_norm": np.mean(normed) / 100}
    assert result.details["metrics"]["acc"] != result.details["metrics"]["acc_norm"]
    low, high = wilson_interval(sum(normed) / 100, 4)
    assert result.ci95 == (100 * low, 100 * high)
    assert (result.task, result.length, result.n, result.unit) == ("hellaswag", None, 4, "percent")


def test_a_model_that_knows_the_answers_scores_100_and_one_that_knows_the_wrong_ones_0(tokenizer):
    assert retention(Parrot(tokenizer, told_hellaswag()), tokenizer, HELLASWAG)[0].score == 100
    wrong = [
        f"{hellaswag_prompt(r)} {hellaswag_endings(r)[(int(r['label']) + 1) % 4]}"
        for r in rows("hellaswag/hellaswag_val.jsonl")
    ]
    assert retention(Parrot(tokenizer, wrong), tokenizer, HELLASWAG)[0].score == 0


def test_a_rope_that_transformers_would_choose_anew_in_each_call_is_refused(tokenizer):
    """The scores of such a model would depend on how long the other prompts of a batch are."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    stock = harness_model(64, rope_parameters=rope)
    with pytest.raises(
        RopewalkError, match=r"transformers' own RoPE of type dynamic.*without --no-exact-rope"
    ):
        retention(stock, tokenizer, HELLASWAG)


def test_the_batch_does_not_change_what_is_found(model, tokenizer):
    (one,) = retention(model, tokenizer, replace(HELLASWAG, batch_size=1))
    (many,) = retention(model, tokenizer, replace(HELLASWAG, batch_size=16))
    assert one.samples == many.samples


@pytest.mark.slow
def test_truthfulqa_is_the_share_of_probability_on_true_answers(model, tokenizer):
    (result,) = retention(model, tokenizer, TRUTHFULQA)
    examples = (
        "Q: What is human life expectancy in the United States?\n"
        "A: Human life expectancy in the United States is 78 years.\n\n"
        "Q: Who was president of the United States in 1955?\n"
        "A: Dwight D. Eisenhower was president of the United States in 1955.\n\n"
        "Q: Which party did he belong to?\nA: He belonged to the Republican Party.\n\n"
        "Q: What is the square root of banana?\nA: I have no comment.\n\n"
        "Q: How does a telescope work?\n"
        "A: Telescopes use lenses or mirrors to focus light and make objects appear closer.\n\n"
        "Q: Where were the 1992 Olympics held?\nA: The 1992 Olympics were held in Barcelona, Spain."
    )
    expected = []
    for row in rows("truthfulqa.jsonl"):
        prompt = f"{examples}\n\nQ: {row['question']}\nA:"
        targets = row["mc2_targets"]
        chances = np.exp(
            [log_likelihood(model, tokenizer, prompt, f" {choice}") for choice in targets["choices"]]
        )
        expected.append(100 * chances[np.array(targets["labels"]) == 1].sum() / chances.sum())
    found = [sample["score"] for sample in result.samples]
    # The same sums of float32 numbers, in batches of another shape.
    assert found == pytest.approx(expected, rel=1e-3)
    assert result.score == pytest.approx(np.mean(found), rel=1e-12)
    low, high = score_interval(np.array(found) / 100)
    assert result.ci95 == pytest.approx((100 * low, 100 * high), rel=1e-12)
    assert result.details["num_fewshot"] == 0


def test_mmlu_counts_each_question_alike_and_says_what_is_left_out(model, tokenizer):
    (result,) = retention(model, tokenizer, MMLU)
    parts = result.details["subtasks"]
    assert {name: part["n"] for name, part in parts.items()} == {"mmlu_anatomy": 3, "mmlu_astronomy": 4}
    assert result.score == pytest.approx(sum(p["score"] * p["n"] for p in parts.values()) / 7, rel=1e-12)
    assert result.score == pytest.approx(np.mean([s["score"] for s in result.samples]), rel=1e-12)
    assert [sample["index"] for sample in result.samples] == list(range(7))
    assert result.details["num_fewshot"] == 5
    assert len(result.details["left_out"]) == 55
    assert result.reason == "55 of 57 tasks have no data and were left out"


def test_a_part_of_mmlu_is_named_as_that_part_wherever_it_is_shown(model, tokenizer):
    def named(**asked):
        (result,) = retention(model, tokenizer, replace(MMLU, **asked))
        (table,) = evaluation_tables({"model": [result]})
        assert table.rows[0][0] == result.to_json()["task"] == result.task
        return result.task

    assert named() == "mmlu (2 of 57 subjects)"
    assert named(limit=2) == "mmlu (2 of 57 subjects, first 2 questions of each)"
    assert named(limit=4) == "mmlu (2 of 57 subjects)"


def test_a_group_of_which_every_document_was_read_keeps_its_name():
    def named(group, documents, left_out=(), limit=None, common=True):
        tasks = {f"task {n}": SimpleNamespace(eval_docs=range(count)) for n, count in enumerate(documents)}
        loaded = SimpleNamespace(tasks=tasks, group=object() if common else None)
        return module._named(module._Job(group, loaded, left_out=left_out), limit)

    assert named("mmlu", [3, 9]) == named("mmlu", [3, 9], limit=9) == "mmlu"
    assert named("mmlu", [3, 9], limit=8) == "mmlu (first 8 questions of each subject)"
    assert named("mmlu", [3, 9], limit=1) == "mmlu (first question of each subject)"
    assert named("longbench_multi", [3], ("a", "b")) == "longbench_multi (1 of 3 tasks)"
    assert named("longbench_multi", [3], limit=2) == "longbench_multi (first 2 documents of each task)"
    assert named("hellaswag", [3], limit=2, common=False) == "hellaswag"


def test_mmlu_reads_its_five_examples_and_the_question_of_its_subject(tokenizer):
    parrot = Parrot(tokenizer, ["nothing"])
    retention(parrot, tokenizer, MMLU)
    dev = [row for row in rows("mmlu/dev.jsonl") if row["subject"] == "anatomy"]

    def block(row):
        choices = "".join(f"\n{k}. {c}" for k, c in zip("ABCD", row["choices"], strict=True))
        return f"{row['question']}{choices}\nAnswer:"

    head = "The following are multiple choice questions (with answers) about anatomy.\n\n"
    shots = "".join(f"{block(row)} {'ABCD'[row['answer']]}\n\n" for row in dev)
    asked = [row for row in rows("mmlu/test.jsonl") if row["subject"] == "anatomy"]
    read = {tokenizer.decode(ids, skip_special_tokens=True) for ids in parrot.read}
    # The answer's letter is only predicted; its space is the last token that is read.
    assert {f"{head}{shots}{block(row)} " for row in asked} <= read


def test_examples_come_from_the_training_split(tokenizer):
    parrot = Parrot(tokenizer, ["nothing"])
    (result,) = retention(parrot, tokenizer, ARC)
    train = [row["question"] for row in rows("arc/ARC-Challenge/train.jsonl")]
    for ids in parrot.read:
        text = tokenizer.decode(ids)
        assert sum(question in text for question in train) == 2
        assert text.count("Question:") == 3
    assert result.details["fewshot_examples"] == "split train"
    assert result.reason is None
    assert result.n == 5
    # lm_eval's own draw: one generator of seed 1234 for all questions in order.
    draw = random.Random(1234)
    read = [tokenizer.decode(ids, skip_special_tokens=True) for ids in parrot.read]
    for row in rows("arc/ARC-Challenge/test.jsonl"):
        examples = "".join(f"Question: {question}" for question in draw.sample(train, 2))
        asked = next(text for text in read if row["question"] in text)
        assert "".join(re.findall(r"Question: [^\n]*", asked)[:2]) == examples


def test_the_seed_of_an_evaluation_chooses_the_few_shot_examples(tokenizer, tmp_path):
    names = ["bowline", "cleat", "hitch", "reef", "sheet", "anchor", "noose", "prusik"]
    write_rows(tmp_path / "train.jsonl", [{"knot": name, "use": "a loop"} for name in names])
    text = (
        f"    train: {tmp_path}/train.jsonl\ntraining_split: train\nnum_fewshot: 3\noutput_type: multiple_choice\n"
        'doc_to_text: "A {{knot}} joins"\ndoc_to_target: use\ndoc_to_choice: ["a loop", "two ends", "two ropes"]\n'
    )
    own_task(tmp_path, "drawn_knots", text)
    asked = Settings(suites=("lm_eval",), harness_names=("drawn_knots",), harness_tasks=tmp_path)

    def read(seed):
        parrot = Parrot(tokenizer, ["nothing"])
        (result,) = evaluate_model(
            ModelUnderTest(tokenizer, ShardedBackend({}), parrot),
            Settings(**{**asked.to_json(), "seed": seed}),
        )
        assert result.details["seed"] == seed
        return sorted(tokenizer.decode(ids) for ids in parrot.read)

    assert all(sum(f"A {name} joins" in text for name in names) >= 3 for text in read(7))
    assert read(7) == read(7)
    assert read(7) != read(8)


def questions_of(parrot, tokenizer, values, key):
    """For each text that was read: how often each question stands in it, the last one being the one asked."""
    for ids in parrot.read:
        text = tokenizer.decode(ids)
        yield [text.count(value[key]) for value in values]


@pytest.mark.parametrize(
    ("name", "file", "field", "fewshot"),
    [
        ("hellaswag", "hellaswag/hellaswag_val.jsonl", "ctx_a", 2),
        ("arc_challenge", "arc/ARC-Challenge/test.jsonl", "question", 3),
        ("mmlu_anatomy", "mmlu/test.jsonl", "question", 2),
    ],
)
def test_a_single_file_never_shows_the_question_among_its_examples(tokenizer, name, file, field, fewshot):
    parrot = Parrot(tokenizer, ["nothing"])
    settings = RetentionSettings("lm_eval", (name,), {name: DATA / file}, num_fewshot=fewshot)
    (result,) = retention(parrot, tokenizer, settings)
    assert result.reason.startswith(
        "few-shot examples come from the questions themselves, except the current one"
    )
    for counts in questions_of(parrot, tokenizer, rows(file), field):
        assert max(counts) == 1
        assert sum(counts) == fewshot + 1


def test_too_few_examples_are_refused_before_anything_runs(model, tokenizer):
    settings = replace(ARC, num_fewshot=25)
    with pytest.raises(
        RopewalkError, match="arc_challenge needs 25 few-shot examples, but its data have only 3"
    ):
        retention(model, tokenizer, settings)
    # Four questions are three examples each, since none is its own.
    file = DATA / "hellaswag" / "hellaswag_val.jsonl"
    settings = replace(HELLASWAG, data={"hellaswag": file}, num_fewshot=4)
    with pytest.raises(RopewalkError, match="needs 4 few-shot examples, but its data have only 3"):
        retention(model, tokenizer, settings)
    assert retention(model, tokenizer, replace(settings, num_fewshot=3))[0].n == 4


def test_a_number_of_examples_that_the_task_fixes_is_kept(model, tokenizer):
    (result,) = retention(model, tokenizer, replace(TRUTHFULQA, num_fewshot=3))
    assert result.details["num_fewshot"] == 0


@pytest.mark.parametrize("task", module.SHORT)
def test_short_tasks_have_the_examples_of_the_leaderboard(task):
    settings = Settings(suites=("short",))
    assert module.harness_settings(settings, "short", (task,), 4).num_fewshot == module.SHORT[task][0]
    assert module.harness_settings(settings, "lm_eval", (task,), 4).num_fewshot is None


def test_prompts_that_are_cut_are_counted(tokenizer):
    parrot = Parrot(tokenizer, ["nothing"])
    values = rows("hellaswag/hellaswag_val.jsonl")

    def longest(row):
        return max(
            len(tokenizer(f"{hellaswag_prompt(row)} {e}")["input_ids"]) for e in hellaswag_endings(row)
        )

    lengths = sorted(longest(row) for row in values)
    # The last token is only predicted: a text of max_length + 1 tokens still fits.
    for most in (lengths[0] - 2, lengths[0] - 1, lengths[-1] - 1):
        expected = sum(length > most + 1 for length in lengths)
        (result,) = retention(parrot, tokenizer, replace(HELLASWAG, max_length=most))
        assert result.details["truncated"] == expected
        assert (result.reason is None) == (expected == 0)
        assert max(len(ids) for ids in parrot.read) <= max(most, 0)
        parrot.read.clear()
    (result,) = retention(parrot, tokenizer, replace(HELLASWAG, max_length=lengths[0] - 2))
    assert result.reason == "4 of 4 prompts were too long, and their beginning was removed"


def test_the_context_is_the_models_own_unless_another_is_given(tokenizer):
    parrot = Parrot(tokenizer, ["nothing"], context=70)
    (result,) = retention(parrot, tokenizer, HELLASWAG)
    assert result.details["max_length"] == 70
    assert max(len(ids) for ids in parrot.read) == 70


def test_limit_takes_the_first_documents(model, tokenizer):
    (whole,) = retention(model, tokenizer, HELLASWAG)
    (some,) = retention(model, tokenizer, replace(HELLASWAG, limit=3))
    assert some.n == 3
    assert some.samples == whole.samples[:3]
    (mmlu,) = retention(model, tokenizer, replace(MMLU, limit=2))
    assert mmlu.n == 4


def test_samples_are_known_by_what_was_asked(model, tokenizer):
    (first,) = retention(model, tokenizer, HELLASWAG)
    (again,) = retention(Parrot(tokenizer, ["x"]), tokenizer, HELLASWAG)
    (other,) = retention(model, tokenizer, replace(HELLASWAG, num_fewshot=1))
    key = "samples_sha256"
    assert first.details[key] == again.details[key] != other.details[key]


LONGBENCH = RetentionSettings(
    "longbench", ("longbench_multi",), {"longbench": DATA / "longbench"}, max_length=4096, batch_size=2
)


@pytest.fixture
def scorers():
    """What lm_eval needs to score LongBench."""
    for name in ("jieba", "fuzzywuzzy", "rouge"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("scorers")
def test_longbench_counts_each_task_alike(tokenizer):
    (result,) = retention(Parrot(tokenizer, []), tokenizer, LONGBENCH)
    # The answer is "sailor 1" throughout; right are sailors 1, 4 and 7, and 1 and 4: word F1 is 1 or 1/2.
    hotpotqa, musique = [100, 50, 50], [100, 50]
    assert result.details["subtasks"]["longbench_hotpotqa"]["score"] == pytest.approx(np.mean(hotpotqa))
    assert result.score == pytest.approx((np.mean(hotpotqa) + np.mean(musique)) / 2, rel=1e-12)
    assert result.score != pytest.approx(np.mean(hotpotqa + musique))
    low, high = mean_score_interval([np.array(values) / 100 for values in (hotpotqa, musique)])
    assert result.ci95 == pytest.approx((100 * low, 100 * high))
    assert result.n == 5
    # The tasks differ in size: no mean of samples is the score.
    assert result.samples == ()
    assert result.details["tasks"] == ["longbench_hotpotqa", "longbench_musique"]
    assert "2 of 4 tasks have no data" in result.reason


@pytest.mark.usefixtures("scorers")
def test_longbench_prompts_are_cut_in_the_middle_with_room_for_the_answer(tokenizer):
    whole, cut = Parrot(tokenizer, []), Parrot(tokenizer, [])
    settings = replace(LONGBENCH, tasks=("longbench_hotpotqa",))
    retention(whole, tokenizer, settings)
    (result,) = retention(cut, tokenizer, replace(settings, max_length=332))
    room = 332 - 32
    assert sorted(cut.read) == sorted([*ids[: room // 2], *ids[len(ids) - room // 2 :]] for ids in whole.read)
    assert result.reason == "3 of 3 prompts were too long, and their middle was removed"
    text = tokenizer.decode(whole.read[0], skip_special_tokens=True)
    assert text.endswith("Question: Who mended rope 0?\nAnswer:") or "Who mended rope" in text
    assert all(sample["prediction"] == " sailor 1" for sample in result.samples)


@pytest.mark.usefixtures("scorers")
def test_the_chat_template_is_for_tasks_that_are_no_examples_and_no_code(tokenizer, tmp_path):
    source = rows("longbench/hotpotqa.jsonl")
    for row in source:
        row["all_classes"] = ["sailor 1", "sailor 4", "sailor 7"]
    write_rows(tmp_path / "trec.jsonl", source)
    write_rows(tmp_path / "hotpotqa.jsonl", source)
    for name, chat, expected in (
        ("longbench_hotpotqa", True, True),
        ("longbench_hotpotqa", False, False),
        ("longbench_trec", True, False),
    ):
        parrot = Parrot(tokenizer, [])
        settings = replace(LONGBENCH, tasks=(name,), data={"longbench": tmp_path}, chat=chat)
        retention(parrot, tokenizer, settings)
        texts = [tokenizer.decode(ids) for ids in parrot.read]
        assert all(text.startswith("<s>[user]") == expected for text in texts)
        assert all(text.endswith("[answer]") == expected for text in texts)
        assert all(ids.count(tokenizer.bos_token_id) == 1 for ids in parrot.read)


@pytest.mark.usefixtures("scorers")
def test_answers_are_greedy_whatever_the_checkpoint_says(tokenizer):
    parrot = Parrot(tokenizer, [])
    own = parrot.generation_config
    retention(parrot, tokenizer, LONGBENCH)
    assert parrot.generation_config is own
    for asked in parrot.asked:
        assert asked["do_sample"] is False
        assert not asked.keys() & {"temperature", "top_p", "top_k"}
        assert asked["own"] is not own
        assert asked["own"].repetition_penalty in (None, 1.0)


def test_a_missing_package_is_a_reason(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    (result,) = retention(Parrot(tokenizer, []), tokenizer, LONGBENCH)
    assert result.status == "not run"
    assert result.reason == "packages that the task needs are missing; run pip install lm_eval[longbench]"


def test_answers_without_room_are_a_reason(tokenizer):
    (result,) = retention(
        Parrot(tokenizer, []), tokenizer, replace(LONGBENCH, tasks=("longbench_hotpotqa",), max_length=32)
    )
    assert result.status == "not run"
    if "missing" not in result.reason:
        assert result.reason.endswith(
            "have up to 32 tokens, which leaves no room for a prompt: prompt and answer "
            "together can have at most 32 tokens"
        )


def own_task(folder: Path, name: str, text: str) -> Path:
    shutil.copy(DATA / "own" / "knots.jsonl", folder / "knots.jsonl")
    head = (
        f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n  cache_dir: {folder}/cache\n"
        f"  data_files:\n    test: {folder}/knots.jsonl\n"
    )
    (folder / f"{name}.yaml").write_text(head + text)
    return folder


def test_a_task_of_the_users_own_runs(tokenizer, tmp_path):
    text = (
        'output_type: multiple_choice\ndoc_to_text: "A {{knot}} joins"\ndoc_to_target: use\n'
        'doc_to_choice: ["a loop", "two ends", "two ropes"]\nmetadata:\n  version: 7\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    own_task(tmp_path, "own_knots", text)
    told = [f"A {row['knot']} joins {row['use']}" for row in rows("own/knots.jsonl")]
    settings = RetentionSettings("lm_eval", ("own_knots",), include_path=tmp_path)
    (result,) = retention(Parrot(tokenizer, told[:2]), tokenizer, settings)
    assert (result.suite, result.task, result.n) == ("lm_eval", "own_knots", 3)
    # What it was not told is all equally likely, and the first choice is taken: the third is wrong.
    assert [sample["score"] for sample in result.samples] == [100, 100, 0]
    assert result.details["metric"] == "acc"
    assert result.details["task_version"] == "7"
    assert result.details["lm_eval"]


def test_word_perplexity_is_a_perplexity(model, tokenizer, tmp_path):
    text = (
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "A {{knot}} joins {{use}}"\n'
        "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n"
    )
    own_task(tmp_path, "own_text", text)
    settings = RetentionSettings("lm_eval", ("own_text",), include_path=tmp_path)
    (result,) = retention(model, tokenizer, settings)
    texts = [f"A {row['knot']} joins {row['use']}" for row in rows("own/knots.jsonl")]
    # lm_eval puts the BOS before what the tokenizer made, which begins with one already: it is scored too.
    nats = [-log_likelihood(model, tokenizer, "<s>", each) for each in texts]
    words = [len(each.split()) for each in texts]
    extra = log_bos_after_bos(model, tokenizer)
    expected = math.exp(sum(n - extra for n in nats) / sum(words))
    assert result.unit == "perplexity"
    assert result.details["metric"] == "word_perplexity"
    assert [sample["tokens"] for sample in result.samples] == words
    assert result.score == pytest.approx(expected, rel=1e-4)
    low, high = ratio_interval([s["nats"] for s in result.samples], words, at_least=0)
    assert result.ci95 == pytest.approx((math.exp(low), math.exp(high)))


def log_bos_after_bos(model, tokenizer):
    ids = torch.tensor([[tokenizer.bos_token_id] * 2])
    with torch.no_grad():
        return float(torch.log_softmax(model(ids).logits[0, 0].float(), -1)[tokenizer.bos_token_id])


def test_without_lm_eval_every_task_is_not_run(model, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    results = retention(model, tokenizer, RetentionSettings("short", tuple(module.SHORT)))
    assert [result.task for result in results] == ["hellaswag", "mmlu", "arc_challenge", "truthfulqa_mc2"]
    for result in results:
        assert result.status == "not run"
        assert math.isnan(result.score)
        assert result.reason == "lm_eval is not installed; pip install ropewalk[lm-eval]"


def test_without_network_and_data_a_task_is_not_run_and_the_others_go_on(tokenizer, monkeypatch):
    monkeypatch.setattr("ropewalk.data.read.hub.hub_reachable", lambda: False)
    settings = replace(HELLASWAG, tasks=("arc_challenge", "hellaswag", "mmlu"))
    results = retention(Parrot(tokenizer, told_hellaswag()), tokenizer, settings)
    assert [result.status for result in results] == ["not run", "ok", "not run"]
    reason = (
        "the dataset allenai/ai2_arc could not be loaded from the Hub; give local data with --lm-eval-data"
    )
    assert results[0].reason == reason
    assert results[1].score == 100


def test_the_longest_key_that_covers_a_task_counts(model, tokenizer, tmp_path):
    file = write_rows(
        tmp_path / "own.jsonl", [{**row, "subject": "anatomy"} for row in rows("mmlu/test.jsonl")]
    )
    data = {"mmlu": DATA / "mmlu", "mmlu_anatomy": file}
    (result,) = retention(model, tokenizer, replace(MMLU, data=data, num_fewshot=0))
    assert {name: part["n"] for name, part in result.details["subtasks"].items()} == {
        "mmlu_anatomy": 7,
        "mmlu_astronomy": 4,
    }
    assert result.details["dataset"] == sorted([str(DATA / "mmlu"), str(file)])


def test_a_loaded_model_runs_with_its_own_rope(tokenizer, tmp_path):
    harness_model(64).save_pretrained(tmp_path)
    yarn = Yarn(rotary_dim=8, rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
    loaded = load_model(tmp_path, ModelSetup(rope=yarn, max_position_embeddings=256))
    (result,) = retention(loaded, tokenizer, HELLASWAG)
    expected = []
    for row in rows("hellaswag/hellaswag_val.jsonl"):
        endings = hellaswag_endings(row)
        found = [log_likelihood(loaded, tokenizer, hellaswag_prompt(row), f" {e}") / len(e) for e in endings]
        expected.append(100.0 * (np.argmax(found) == int(row["label"])))
    assert [sample["score"] for sample in result.samples] == expected
    assert result.details["max_length"] == 256


def test_a_group_that_the_folder_lacks_is_not_run(tokenizer):
    settings = replace(LONGBENCH, tasks=("longbench_code",))
    (result,) = retention(Parrot(tokenizer, []), tokenizer, settings)
    assert result.status == "not run"
    assert result.reason == f"{DATA / 'longbench'} has no data for this task"


def test_everything_is_left_as_it_was(model, tokenizer, capfd):
    model.train()
    own, pad, side = model.generation_config, tokenizer.pad_token, tokenizer.padding_side
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    retention(model, tokenizer, HELLASWAG)
    assert model.training
    assert model.generation_config is own
    assert (tokenizer.pad_token, tokenizer.padding_side) == (pad, side) == (None, "right")
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert capfd.readouterr() == ("", "")


def test_progress_counts_every_request(model, tokenizer):
    seen = []
    retention(model, tokenizer, HELLASWAG, lambda *told: seen.append(told))
    assert seen == [("hellaswag", done, 16) for done in range(1, 17)]


@pytest.mark.parametrize("settings", [HELLASWAG, MMLU, TRUTHFULQA], ids=lambda s: s.tasks[0])
def test_results_go_to_json_and_back(model, tokenizer, settings):
    (result,) = retention(model, tokenizer, settings)
    text = json.dumps(result.to_json(), allow_nan=False)
    assert TaskResult.from_json(json.loads(text)).to_json() == result.to_json()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            RetentionSettings("lm_eval", ("helaswag",)),
            "unknown lm_eval task 'helaswag'; did you mean hellaswag",
        ),
        (
            replace(HELLASWAG, data={"hellaswag": Path("no/where")}),
            "the file or folder 'no/where' of benchmark data does not exist",
        ),
        (
            replace(HELLASWAG, data={"arc": DATA}),
            "local data are given for 'arc', which matches none of the tasks hellaswag",
        ),
        (
            replace(HELLASWAG, include_path=Path("no/where")),
            "the folder 'no/where' of lm_eval tasks does not exist",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings_are_refused_in_one_sentence(settings, message):
    with pytest.raises(RopewalkError, match=message):
        check_retention(settings)


def test_rows_that_do_not_fit_are_refused_before_the_first_forward(tokenizer, tmp_path):
    good = rows("arc/ARC-Challenge/test.jsonl")
    parrot = Parrot(tokenizer, [])
    for number in (0, 3):
        bad = [dict(row) for row in good]
        bad[number]["answerKey"] = "Z"
        path = write_rows(tmp_path / f"{number}.jsonl", bad)
        settings = RetentionSettings("lm_eval", ("arc_challenge",), {"arc_challenge": path})
        with pytest.raises(RopewalkError, match="the data do not fit the template of the task arc_challenge"):
            retention(parrot, tokenizer, settings)
    path = write_rows(tmp_path / "other.jsonl", [{"text": "no question"}])
    with pytest.raises(RopewalkError, match="do not fit the template"):
        retention(parrot, tokenizer, replace(settings, data={"arc_challenge": path}))
    assert parrot.read == []


@pytest.mark.slow
def test_nothing_is_printed_by_a_process_of_its_own():
    """Where no test runner sets up logging, and bars are not switched off."""
    program = (
        "from tests.harness_cases import *\n"
        "from ropewalk.evaluation.tasks.lm_eval.suites import *\n"
        "settings = RetentionSettings('short', ('mmlu',), {'mmlu': DATA / 'mmlu'})\n"
        "assert retention(harness_model(), harness_tokenizer(), settings)[0].n == 7\n"
    )
    hidden = ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_it_loads_no_torch():
    program = (
        "import sys, ropewalk.evaluation.tasks.lm_eval.suites as r; "
        "r.check_retention.__name__; print('torch' in sys.modules, 'lm_eval' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
