"""The script that trains the small retrieval model: its exams are the benchmarks' own prompts."""

import importlib
import itertools
import random
import re
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.longeval import LinesTask
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.ruler.niah import NeedleTask
from ropewalk.evaluation.tasks.words import words_unavailable
from tests.places import ROOT

SCRIPTS = ROOT / "scripts"
NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d{7})\.")
LINE = re.compile(r"line (\S+): REGISTER_CONTENT is <(\d+)>\n")

pytestmark = pytest.mark.skipif(words_unavailable() is not None, reason=words_unavailable() or "")


@pytest.fixture(scope="module")
def script():
    """The script as a module; it imports its rows from the folder that it lies in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("train_retrieval_model")
        for name in ("train_retrieval_model", "retrieval_rows"):
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def tokenizer(script):
    return script.train_tokenizer(seed=3, texts=300)


@pytest.fixture
def writer(script):
    return script.ExamWriter(random.Random(5))


@pytest.fixture
def maker(script, tokenizer):
    return script.RowMaker(tokenizer, seed=7)


def shape_of(text):
    """A prompt with placeholders for its keys and numbers."""
    return re.sub(r"\d+", "0", re.sub(r"[\w']+(-[\w']+)+(?= is:| mentioned|, |:|\?)", "KEY", text))


def only_prompt(exam):
    ((question, _),) = exam.questions
    return exam.context + question


def own_prompt(task, tokenizer):
    sample = next(iter(task.samples(PromptEncoder(tokenizer), 512, 1, seed=11)))
    return sample.text + sample.answer_prefix, sample


def test_lines_exam_is_longevals_prompt(tokenizer, writer):
    # The question alone: the script was measured on it before base models were asked with the answer begun.
    prompt, sample = own_prompt(LinesTask(protocol="chat"), tokenizer)
    exam = writer.lines(sample.details["units"] - 1, 1, bare=False)
    assert shape_of(only_prompt(exam)) == shape_of(prompt)


def test_passkey_exam_is_the_passkey_prompt(tokenizer, writer):
    prompt, _ = own_prompt(PasskeyTask("even"), tokenizer)
    opening, before, needle, after, question = prompt.split("\n")
    found = [only_prompt(writer.passkey(8)).split("\n") for _ in range(20)]
    assert {shape_of(parts[0]) for parts in found} == {opening}
    assert {shape_of(parts[2]) for parts in found} == {shape_of(needle)}
    assert {parts[4] for parts in found} == {question}
    for parts in found:
        for noise in (parts[1], parts[3]):
            assert (before + " " + after).startswith(noise) or before.startswith(noise)
        assert (parts[1] + parts[3]).count(".") == 8


@pytest.mark.parametrize("haystack", ["noise", "needle"])
def test_single_needle_exam_is_rulers_prompt(tokenizer, writer, haystack):
    prompt, sample = own_prompt(NeedleTask("niah", haystack), tokenizer)
    exam = writer.needles(sample.details["units"], 1, bare=False, haystack=haystack)
    assert sorted(shape_of(only_prompt(exam)).split("\n")) == sorted(shape_of(prompt).split("\n"))


@pytest.mark.parametrize("asked", [{"values": 4}, {"queries": 4}])
def test_exam_with_several_numbers_is_rulers_prompt(tokenizer, writer, asked):
    task = NeedleTask("niah", "noise", keys=asked.get("queries", 1), **asked)
    prompt, sample = own_prompt(task, tokenizer)
    exam = writer.needles(sample.details["units"], 1, bare=False, haystack="noise", **asked)
    assert sorted(shape_of(only_prompt(exam)).split("\n")) == sorted(shape_of(prompt).split("\n"))


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("haystack", ["noise", "needle"])
def test_needle_answers_are_what_the_text_says(writer, haystack, bare):
    exam = writer.needles(5, 3, bare, haystack)
    said = dict(NEEDLE.findall(exam.context))
    assert len(exam.questions) == 3
    for question, answer in exam.questions:
        (key,) = {key for key in said if f" for {key} mentioned" in question}
        assert METRICS["all"](answer, [said[key]]) == 1


def test_several_values_are_told_in_the_order_of_the_text(writer):
    exam = writer.needles(6, 1, False, "noise", values=4)
    ((_, answer),) = exam.questions
    assert re.findall(r"\d+", answer) == [value for _, value in NEEDLE.findall(exam.context)]


def test_several_queries_are_answered_in_their_order(writer):
    exam = writer.needles(6, 1, False, "noise", queries=4)
    ((question, answer),) = exam.questions
    said = dict(NEEDLE.findall(exam.context))
    asked = re.search(r"numbers for ([^?]*) mentioned in the provided text are$", question)[1]
    keys = re.split(r", and |, ", asked)
    assert re.findall(r"\d+", answer) == [said[key] for key in keys]


@pytest.mark.parametrize("bare", [False, True])
def test_line_answers_are_what_the_record_says(writer, bare):
    exam = writer.lines(6, 4, bare)
    said = dict(LINE.findall(exam.context))
    assert len(said) == 10
    for question, answer in exam.questions:
        (key,) = {key for key in said if f" line {key}?" in question}
        assert METRICS["last integer"](answer, [said[key]]) == 1


@pytest.mark.parametrize("length", [64, 128, 256, 512])
def test_exams_fit_their_length_and_train_on_whole_answers(script, tokenizer, maker, length):
    for _ in range(30):
        ids, weights = maker.exam(length)
        assert len(ids) == len(weights) <= length
        assert ids[0] == tokenizer.bos_token_id
        runs = re.findall("1+", "".join("01"[weight > 0] for weight in weights))
        assert len(runs) == sum(
            id == tokenizer.eos_token_id for id, weight in zip(ids, weights, strict=True) if weight
        )
        assert weights[-1]
        assert ids[-1] == tokenizer.eos_token_id


def test_answers_are_tokenised_as_a_model_goes_on_from_the_prompt(tokenizer, maker, writer):
    for exam in [writer.passkey(4), writer.lines(3, 1, False), writer.needles(3, 1, False, "noise")]:
        ids, weights = maker.exam_ids(exam)
        ((question, answer),) = exam.questions
        prompt = PromptEncoder(tokenizer).encode(exam.context + question)
        assert ids[: weights.index(True)] == list(prompt.input_ids)
        assert tokenizer.decode(ids[weights.index(True) : -1]) == answer
        assert ids == [*PromptEncoder(tokenizer).encode(exam.context + question + answer).input_ids, ids[-1]]


def test_weighted_tokens_of_copying_rows_were_said_before(tokenizer, maker):
    for _ in range(20):
        ids, weights = maker.copying(96)
        assert len(ids) == len(weights) == 96
        assert not any(
            weight for id, weight in zip(ids, weights, strict=True) if id == tokenizer.eos_token_id
        )
        starts = [n + 1 for n, id in enumerate(ids) if id in (tokenizer.bos_token_id, tokenizer.eos_token_id)]
        for start, end in zip(starts, [*starts[1:], 97], strict=True):
            inside, weighted = ids[start : end - 1], weights[start : end - 1]
            if any(weighted):
                period = weighted.index(True)
                assert inside[period:] == inside[:-period]


def test_recalled_digits_follow_their_key_earlier(tokenizer, maker):
    digits = {tokenizer.convert_tokens_to_ids(str(n)) for n in range(10)}
    for _ in range(40):
        ids, weights = maker.recall(128)
        assert len(ids) == len(weights)
        assert {id for id, weight in zip(ids, weights, strict=True) if weight} <= digits
        runs = [run.span() for run in re.finditer("1+", "".join("01"[weight > 0] for weight in weights))]
        stored, after = ids[: runs[0][0]], len(ids) - runs[-1][1]
        asked = [
            (ids[before_end + after], ids[start:end])
            for (_, before_end), (start, end) in itertools.pairwise(runs)
        ]

        def was_said(key, value, distance, stored=stored):
            starts = [n for n, id in enumerate(stored) if id == key]
            return any(stored[n + distance : n + distance + len(value)] == value for n in starts)

        assert any(all(was_said(*each, distance) for each in asked) for distance in range(1, 13))


def test_same_seed_gives_the_same_rows(script, tokenizer):
    def rows(seed):
        maker = script.RowMaker(tokenizer, seed)
        return [maker.row(stage) for stage in script.STAGES for _ in range(5)]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_digits_stand_alone_and_noise_is_cheap(tokenizer):
    ids = tokenizer.encode("The key is 1234567.", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids)[-8:-1] == list("1234567")
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    words_and_stops = len(noise.split()) + noise.count(".") + 1
    assert len(tokenizer.encode(noise, add_special_tokens=False)) <= words_and_stops


@pytest.mark.parametrize("text", ["Żółć ≠ 🦆\t\n", "line a-b: REGISTER_CONTENT is <12>"])
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_first_layers_heads_begin_by_looking_back(script, tokenizer):
    torch.manual_seed(0)
    model = script.build_model(len(tokenizer))
    model.set_attn_implementation("eager")
    ids = torch.randint(2, len(tokenizer), (4, 100))
    with torch.no_grad():
        attention = model(input_ids=ids, output_attentions=True).attentions[0]
    for head in range(script.HEADS):
        by_distance = [attention[:, head].diagonal(-back, 1, 2)[:, 10 - back :].mean() for back in range(10)]
        assert torch.stack(by_distance).argmax() == head + 1


def test_answer_loss_is_the_mean_over_weighted_tokens(script, tokenizer, maker):
    torch.manual_seed(0)
    model = script.build_model(len(tokenizer))
    rows = [maker.exam(200), maker.recall(64)]
    loss, right = script.answer_loss(model, *script.batch_of(rows))
    losses, hits, total = [], [], 0.0
    with torch.no_grad():
        for ids, weights in rows:
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            for position, weight in enumerate(weights):
                if weight:
                    before = logits[position - 1]
                    losses.append(weight * F.cross_entropy(before, torch.tensor(ids[position])).item())
                    total += weight
                    hits.append(before.argmax().item() == ids[position])
    assert loss.item() == pytest.approx(sum(losses) / total, rel=1e-5)
    assert right == pytest.approx(sum(hits) / len(hits), rel=1e-6)


def test_stages_follow_each_other_to_the_context(script):
    found = [script.stage_at(n / 1000) for n in range(1001)]
    assert [stage for n, stage in enumerate(found) if n == 0 or stage != found[n - 1]] == list(script.STAGES)
    assert found[-1].length == script.CONTEXT


def test_learning_rate_rises_stays_and_falls(script):
    assert script.rate_share(0, 0.0) == pytest.approx(1 / script.WARMUP_STEPS)
    assert script.rate_share(script.WARMUP_STEPS, 0.1) == 1
    assert script.rate_share(10_000, 0.5) == 1
    assert script.rate_share(10_000, 0.75) == pytest.approx(0.5 + script.FINAL_RATE_SHARE)
    assert script.rate_share(10_000, 1.0) == pytest.approx(script.FINAL_RATE_SHARE)


def test_short_run_writes_a_folder_that_transformers_loads(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "BATCH_TOKENS", 512)
    script.main(["--output", str(tmp_path / "model"), "--steps", "4", "--samples", "0"])
    assert "4 steps" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.bos_token_id, model.config.eos_token_id) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    assert model.config.max_position_embeddings == script.CONTEXT
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) < 5_000_000
    assert not (tmp_path / "model.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "must be positive"),
        (["--minutes", "-1"], "must be positive"),
        (["--seed", "1000003"], "that of the evaluation"),
    ],
)
def test_unusable_arguments_are_refused(script, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        script.main(["--output", str(tmp_path / "model"), *arguments])
    assert message in capsys.readouterr().err


def test_existing_folder_is_not_overwritten(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--output", str(tmp_path)])
    assert "exists already" in capsys.readouterr().err
