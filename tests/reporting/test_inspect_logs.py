"""Logs of inspect_ai say of every sample what the folder of the evaluation says, and texts in them are only texts.

What inspect_ai itself makes of a log is checked where it is installed: dev leaves this extra out, because it is large.
"""

import json
import sys
from dataclasses import replace

import pytest

from ropewalk import RunContext
from ropewalk.cli.app import main
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import EvaluationSettings, Settings, evaluate
from ropewalk.evaluation.aggregate import further_results, summarise, task_result
from ropewalk.evaluation.excerpts import AT_EACH_END, excerpt, parts_of
from ropewalk.evaluation.predictions import read_predictions, write_predictions
from ropewalk.evaluation.prompt import plain_chat, turn_starts
from ropewalk.evaluation.record import EvaluationResult, read_record
from ropewalk.evaluation.settings import ExportSettings
from ropewalk.io.files import write_json
from ropewalk.reporting import inspect_logs
from ropewalk.reporting.inspect_logs import export_logs, messages
from tests.evaluation.test_excerpts import answered, prediction, sample

EVIL = (
    "</script><img src=x onerror=alert(1)>\u2028\u202e\x1b[31m\ud800 attachment://ab <think>no</think> {{x}}"
)
NOTICE = (
    "error: the export needs the package inspect_ai, which is not installed; "
    "run pip install 'ropewalk[inspect-ai]'\n"
)


def named(index: int, answer: str, **more):
    """An answer to a question of NoLiMa, which has a further metric."""
    found = answered("Who dived for the monster?", index=index, answer=answer)
    known = {"references": ("Oskar",), "metric": "name", "details": {"others": ["Petra"]}, **more}
    return replace(found, suite="nolima", task="nolima", **known).scored_again()


LONG = "Find the key.\n" + "grass " * 2000 + "the key is 42. " + "grass " * 2000 + "The key is"
ANSWERS = [
    answered(LONG, index=0),
    replace(answered("short", index=1, answer=EVIL, score=0.0), details={EVIL: EVIL}, finished=False),
    replace(answered("short", index=2, answer=" 13", score=0.0), new_tokens=None, finished=None),
    named(0, "Oskar"),
    named(1, "Oskar or Petra", references=("Oskar", EVIL)),
    named(2, "<think>Petra?</think> Oskar", thoughts_opened=False),
    named(3, "<think>Petra, or Oskar", thoughts_opened=False),
]


@pytest.fixture
def folder(tmp_path):
    """A finished evaluation with answers of two tasks, one of which has two scores, and a perplexity."""
    folder = tmp_path / "base"
    write_predictions(folder / "predictions.jsonl", ANSWERS)
    passkey, nolima = ANSWERS[:3], ANSWERS[3:]
    results = [task_result(passkey, {}, {3: EVIL}), task_result(nolima, {}), *further_results(nolima, {})]
    results.append(replace(results[0], suite="perplexity", task="perplexity", unit="perplexity", samples=()))
    record = {
        "model": "models/base",
        "model_sha256": "ab",
        "settings": {"threshold": 85.6, "seed": 0},
        "date": "2026-11-30T20:07:27+00:00",
        "versions": {"ropewalk": "0.1.0"},
        "results": [each.to_json() for each in results],
        "summary": summarise(results, 85.6),
    }
    EvaluationResult(record, tuple(results)).write(folder)
    return folder


class Plain:
    """Stands for inspect_ai's model of a log, which takes plain values as they are."""

    @staticmethod
    def model_validate(value):
        return value


def write_plain(log, path, format):
    assert format == "eval"
    with open(path, "w", encoding="utf-8") as file:
        json.dump(log, file, allow_nan=False, ensure_ascii=False)


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(inspect_logs, "_package", lambda: (Plain, write_plain))


def exported(folder, **more):
    found = export_logs(ExportSettings(folder=folder, out=folder.parent / "logs", **more))
    return found, [json.loads((found.folder / name).read_text(encoding="utf-8")) for name in found.logs]


def test_without_inspect_ai_it_is_refused_in_one_sentence(folder, monkeypatch, capsys):
    for name in ("inspect_ai", "inspect_ai.log", "inspect_ai.viewer"):
        monkeypatch.setitem(sys.modules, name, None)
    out = folder.parent / "logs"
    assert main(["eval", "export", str(folder), "--out", str(out)]) == 2
    assert capsys.readouterr().err == NOTICE
    assert not out.exists()


def test_a_log_for_each_task_and_what_has_no_answers_is_named(folder, plain):
    found, logs = exported(folder)
    assert found.logs[0].startswith("2026-11-30T20-07-27+00-00_passkey-1024_")
    assert (len(found.logs), found.samples, found.whole_prompts) == (2, 7, 0)
    assert found.left_out == ("perplexity at 1,024 tokens",)
    # The viewer of inspect_ai renders Markdown, links and images of logs that do not say this.
    assert all(each["eval"]["viewer"] == {"trust_content": False} for each in logs)
    first, second = (each["results"] for each in logs)
    assert (first["total_samples"], first["completed_samples"]) == (4, 3)
    assert [each["name"] for each in first["scores"]] == ["first integer"]
    assert [each["name"] for each in second["scores"]] == ["name", "alone"]
    by_metric = {each["name"]: each["metrics"] for each in second["scores"]}
    assert [by_metric[name]["mean"]["value"] for name in ("name", "alone")] == [0.75, 0.5]
    low, high = read_record(folder)[1][1].ci95
    ends = [by_metric["name"][name]["value"] for name in ("ci95_low", "ci95_high")]
    assert ends == [low / 100, high / 100]
    values = [{name: each["value"] for name, each in one["scores"].items()} for one in logs[1]["samples"]]
    assert values == [
        {"name": 1.0, "alone": 1.0},
        {"name": 1.0, "alone": 0.0},
        {"name": 1.0, "alone": 1.0},
        {"name": 0.0, "alone": 0.0},
    ]
    # A server that does not say how many tokens it wrote leaves no usage, rather than zero tokens.
    assert [each["output"]["usage"] is None for each in logs[0]["samples"]] == [False, False, True]
    stopped = [each["output"]["choices"][0]["stop_reason"] for each in logs[0]["samples"]]
    assert stopped == ["stop", "max_tokens", "unknown"]


def test_the_same_evaluation_gives_the_same_names(folder, plain):
    first, _ = exported(folder)
    again = export_logs(ExportSettings(folder=folder, out=folder.parent / "again"))
    assert again.logs == first.logs


def test_an_excerpt_says_so_and_thoughts_are_no_answer(folder, plain):
    _, (passkey, nolima) = exported(folder)
    whole, short = passkey["samples"][:2]
    assert (whole["metadata"]["prompt"], short["metadata"]["prompt"]) == ("excerpt", "whole")
    assert short["input"] == "short"
    assert whole["input"].startswith(LONG[:AT_EACH_END] + "\n[… ")
    assert whole["input"].endswith(LONG[-AT_EACH_END:])
    assert "the key is 42." in whole["input"]
    said = [each["output"]["choices"][0]["message"]["content"] for each in nolima["samples"]]
    assert said[2:] == [
        [{"type": "reasoning", "reasoning": "<think>Petra?"}, {"type": "text", "text": "Oskar"}],
        [{"type": "reasoning", "reasoning": "<think>Petra, or Oskar"}, {"type": "text", "text": ""}],
    ]


def test_turns_of_a_chat_are_messages_without_their_marks():
    earlier = (("user", "Write a poem."), ("assistant", "User: roses"))
    text = plain_chat(earlier, "Now a riddle.")
    parts = parts_of(text, [(0, len(text))], turn_starts(earlier, "Now a riddle."))
    assert messages(parts, len(text)) == [
        {"role": "user", "content": "Write a poem.\n"},
        {"role": "assistant", "content": "User: roses\n"},
        {"role": "user", "content": "Now a riddle.\n"},
    ]
    # A role that no chat has is text like any other.
    (one,) = messages([(0, "User: x", "user"), (10, "Evil: y", "evil")], 20)
    assert one == {
        "role": "user",
        "content": "User: x\n[… 3 characters left out …]\nEvil: y\n[… 3 characters left out …]\n",
    }
    assert messages((), 0) == [{"role": "user", "content": ""}]


def test_what_cannot_be_exported_is_refused(folder, tmp_path, plain):
    def refused(message, place=folder, out=tmp_path / "logs"):
        with pytest.raises(RopewalkError, match=message):
            export_logs(ExportSettings(folder=place, out=out))
        assert not (tmp_path / "logs").exists()

    refused("holds other files, which the logs would replace; give --out a new folder", out=folder)
    run = tmp_path / "run"
    write_predictions(run / "predictions-after.jsonl", [prediction()])
    refused("is the folder of a training run, whose answers cannot be exported", run)
    unfinished = tmp_path / "unfinished"
    write_predictions(unfinished / "predictions.jsonl", [prediction()])
    refused("has no finished evaluation, because results.json is missing", unfinished)
    record, _ = read_record(folder)
    write_json(folder / "results.json", {**record, "date": EVIL})
    refused("results.json has no valid date")
    write_json(folder / "results.json", record)
    other = [*ANSWERS[:1], replace(ANSWERS[1], score=1.0), *ANSWERS[2:]]
    write_predictions(folder / "predictions.jsonl", other)
    refused("have different scores of passkey at 1024 tokens; run ropewalk eval rescore .*base first")
    write_predictions(folder / "predictions.jsonl", ANSWERS)
    broken = [{**each, "samples": [{"index": 0}]} for each in record["results"]]
    write_json(folder / "results.json", {**record, "results": broken})
    refused("has a sample of passkey without a score: the field 'score' is missing")


def test_no_name_of_a_task_leads_out_of_the_folder(tmp_path, plain):
    folder, task = tmp_path / "base", "../../x_y\x1b"
    found = replace(prediction(), task=task)
    write_predictions(folder / "predictions.jsonl", [found])
    results = (task_result([found], {}),)
    record = {"model": "m", "settings": {"threshold": 1}, "date": "2026-11-30", "results": []}
    record |= {"results": [each.to_json() for each in results], "versions": {}}
    EvaluationResult(record, results).write(folder)
    result, (log,) = exported(folder)
    assert "_passkey-.-x-y-1024_" in result.logs[0].replace("..-..", ".")
    assert [each.name for each in result.folder.iterdir()] == list(result.logs)
    assert log["eval"]["task_args"]["task"] == task


@pytest.mark.parametrize("prompts", [0, 1])
def test_a_real_evaluation_with_its_prompts_made_again(tmp_path, plain, prompts):
    out = tmp_path / "base"
    what = Settings(suites=("passkey",), lengths=(96,), samples=2)
    evaluate(EvaluationSettings(model="embedded", what=what), RunContext(output=out))
    stored = read_predictions(out / "predictions.jsonl")
    # As if its prompt had been long: only the end was kept.
    text = stored[0].prompt[0][1]
    cut = replace(stored[0], prompt=parts_of(text, [(10, len(text))]))
    write_predictions(out / "predictions.jsonl", [cut, *stored[1:]])
    found, (log,) = exported(out, prompts=prompts)
    assert found.whole_prompts == prompts
    assert log["samples"][0]["metadata"]["prompt"] == ("whole" if prompts else "excerpt")
    assert (log["samples"][0]["input"] == text) == bool(prompts)


def test_inspect_ai_reads_of_each_sample_what_the_folder_says(folder):
    log_module = pytest.importorskip("inspect_ai.log", reason="inspect_ai is an extra, which dev leaves out")
    found = export_logs(ExportSettings(folder=folder, out=folder.parent / "logs"))
    listed = log_module.list_eval_logs(str(found.folder))
    assert sorted(each.name.rpartition("/")[2] for each in listed) == sorted(found.logs)
    record, results = read_record(folder)
    by_task = {each.task: each for each in results}
    stored = read_predictions(folder / "predictions.jsonl")
    for name, task in zip(found.logs, ("passkey", "nolima"), strict=True):
        log = log_module.read_eval_log(str(found.folder / name))
        own = [each for each in stored if each.task == task]
        assert (log.status, log.eval.model, log.eval.packages) == (
            "success",
            "models/base",
            record["versions"],
        )
        assert log.eval.task_args == {"suite": task, "task": task, "length": 1024}
        assert log.eval.metadata["settings"] == record["settings"]
        assert log.eval.viewer.trust_content is False
        assert [each.id for each in log.samples] == [each.index for each in own]
        for read, known in zip(log.samples, own, strict=True):
            assert read.output.completion == known.answer.replace("\ud800", "\\ud800")
            assert read.target == [each.replace("\ud800", "\\ud800") for each in known.references]
            assert read.scores[known.metric].value == known.score
            assert read.scores[known.metric].answer == read.output.completion
            assert read.messages[-1].text == read.output.completion
            assert read.metadata["prompt_sha256"] == known.prompt_sha256
            assert len(read.metadata["details"]) == len(known.details)
            usage = read.output.usage
            assert (usage is None) == (known.new_tokens is None)
            if usage is not None:
                assert (usage.input_tokens, usage.output_tokens) == (known.prompt_tokens, known.new_tokens)
            if known.prompt_characters == sum(len(part) for _, part, _ in known.prompt):
                assert read.input == "".join(part for _, part, _ in known.prompt)
        for score in log.results.scores:
            result = by_task[task if score.name in ("first integer", "name") else f"{task}.{score.name}"]
            mean = sum(each.scores[score.name].value for each in log.samples) / len(log.samples)
            assert score.metrics["mean"].value == pytest.approx(mean, rel=1e-15)
            assert 100 * mean == pytest.approx(result.score, rel=1e-15)
            ends = [100 * score.metrics[name].value for name in ("ci95_low", "ci95_high")]
            assert ends == pytest.approx(result.ci95, rel=1e-15)
            assert (score.scored_samples, score.metadata["n"]) == (result.n, result.n)
    assert excerpt(sample(LONG)) == stored[0].prompt
