"""``ropewalk eval`` through the program's own main, on tiny random checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.cli import app as program
from ropewalk.evaluation.predictions import Prediction, PredictionLog, write_predictions
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.evaluation.test_excerpts import answered

Run = Callable[..., int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, 512 tokens of stated context."""
    return save_byte_checkpoint(tmp_path_factory.mktemp("models") / "tiny", 512)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " + "abc " * 200}) + "\n" for n in range(6)))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command, and no cache but the test's own."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *arguments: program.main(["eval", *map(str, arguments)])


def test_json_holds_results_and_nothing_else(
    run: Run, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--lengths", "256,0.5k", "--text", text, "--rows", 3, "--json", "--suite", "perplexity")
    assert run(checkpoint, *asked) == 0
    said = json.loads(capsys.readouterr().out)
    results = said.pop("results")
    assert said.pop("versions")["ropewalk"]
    assert len(said.pop("model_sha256")) == len(said.pop("tokenizer_sha256")) == 64
    assert said.pop("date").startswith("20")
    assert said.pop("settings")["stride"] == 256
    assert said.pop("backend")["kind"] == "in memory"
    assert said.pop("summary") == {"effective_length": [], "ruler_weighted_average": None}
    assert said == {
        "model": str(checkpoint),
        "suites": ["perplexity"],
        "lengths": [256, 512],
        "text": str(text),
        "engine": "sdpa",
        "dtype": "float32",
        "device": said["device"],
        "exact_rope": True,
    }
    assert [(r["suite"], r["task"], r["length"], r["n"], r["status"], r["reason"]) for r in results] == [
        ("perplexity", "perplexity", 256, 3, "ok", None),
        ("perplexity", "perplexity", 512, 3, "ok", None),
    ]
    # A random model of so small weights knows nothing but the vocabulary's size.
    assert results[0]["score"] == pytest.approx(258, rel=0.1)
    assert [(p["start"], p["end"]) for p in results[0]["positions"]] == [
        (0, 64),
        (64, 128),
        (128, 192),
        (192, 256),
    ]
    assert {"n_tokens", "n_windows", "perplexity", "ci95"} < set(results[1]["positions"][0])


def test_out_holds_results_predictions_figures_and_page(
    run: Run, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "results"
    # A prompt takes some 330 bytes without any noise.
    asked = (checkpoint, "--lengths", 512, "--text", text, "--samples", 2, "--rows", 2, "--out", out)
    assert run(*asked) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "finished.jsonl",
        "passkey.png",
        "perplexity.png",
        "predictions.jsonl",
        "report.html",
        "results.json",
        "run.json",
        "steps",
    ]
    record = json.loads((out / "results.json").read_text())
    assert [result["suite"] for result in record["results"]] == ["perplexity", "passkey"]
    predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 2
    for prediction in predictions:
        assert prediction["suite"] == "passkey"
        assert 0.95 * 512 < prediction["prompt_tokens"] + 10 <= 512
        assert prediction["bos_count"] == 1
    printed = capsys.readouterr()
    assert "Perplexity by position in 2 sequences of 512 tokens" in printed.out
    assert "Passkey retrieval" in printed.out
    assert "Effective length by passkey: none" in printed.out
    assert str(out) in printed.out.replace("\n", "")
    assert "Traceback" not in printed.err

    # The same command again has nothing left to do, and changes nothing.
    before = (out / "predictions.jsonl").read_bytes()
    assert run(*asked, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["results"] == record["results"]
    assert (out / "predictions.jsonl").read_bytes() == before

    assert run(*asked, "--seed", 1) == 2
    told = "contains a different evaluation, which differs in seed (0 in the folder, 1 given); give another --out"
    assert told in capsys.readouterr().err

    # A killed run has lost a line and a half.
    (out / "results.json").unlink()
    (out / "predictions.jsonl").write_bytes(before.splitlines(keepends=True)[0] + b'{"suite": "pass')
    assert run(*asked, "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"] == record["results"]
    assert (out / "predictions.jsonl").read_bytes() == before


def test_ctrl_c_says_where_the_answers_lie_and_how_to_go_on(
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    asked = (checkpoint, "--suite", "passkey", "--lengths", 400, "--samples", 2)

    def interrupted_after(answers: int, *options: object) -> str:
        add, given = PredictionLog.add, []

        def mortal(self: PredictionLog, prediction: Prediction) -> None:
            if len(given) == answers:
                raise KeyboardInterrupt
            given.append(prediction)
            add(self, prediction)

        with monkeypatch.context() as patch:
            patch.setattr(PredictionLog, "add", mortal)
            assert run(*asked, *options) == 130
        return capsys.readouterr().err.splitlines()[-1]

    kept = "nothing was saved; with --out, an interrupted run can resume"
    assert interrupted_after(1) == f"error: interrupted: {kept}"
    nothing = "nothing was measured yet; run the same command to start again"
    assert interrupted_after(0, "--out", out) == f"error: interrupted: {nothing}"
    there = f"the answers and results so far are in {out}; run the same command again to resume"
    assert interrupted_after(1, "--out", out) == f"error: interrupted: {there}"
    first = (out / "predictions.jsonl").read_bytes()
    assert run(*asked, "--out", out) == 0
    assert (out / "predictions.jsonl").read_bytes().startswith(first)


def test_samples_are_made_once_for_a_tokenizer(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "samples"
    asked = ("--suite", "passkey", "--lengths", 500, "--samples", 2, "--samples-dir", kept, "--json")
    assert run(checkpoint, *asked) == 0
    (file,) = kept.iterdir()
    header, *lines, end = (json.loads(line) for line in file.read_text().splitlines())
    assert header["task"] == "passkey"
    assert [line["index"] for line in lines] == [0, 1]
    assert end == {"samples": 2}
    made = file.stat().st_mtime_ns
    other = save_byte_checkpoint(tmp_path / "other", 512, initializer_range=0.3)
    assert run(other, *asked) == 0
    assert [each.stat().st_mtime_ns for each in kept.iterdir()] == [made]


def test_same_seed_gives_the_same_results(
    run: Run, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[Any] = []
    for seed in (1, 1, 2):
        asked = ("--lengths", 400, "--text", text, "--samples", 1, "--rows", 2, "--seed", seed, "--json")
        assert run(checkpoint, *asked) == 0
        said.append(json.loads(capsys.readouterr().out)["results"])
    assert said[0] == said[1]
    assert said[0][1]["details"]["samples_sha256"] != said[2][1]["details"]["samples_sha256"]


def test_length_is_the_configs_if_not_given(
    run: Run, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--suite", "perplexity", "--text", text, "--rows", 1, "--no-exact-rope", "--json")
    assert run(checkpoint, *asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["lengths"] == [512]
    assert said["exact_rope"] is False
    # One row says nothing of the spread between rows.
    assert said["results"][0]["ci95"] == [None, None]


def test_mean_over_checkpoints_with_their_spread(
    run: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "checkpoints", tmp_path / "out"
    first = save_byte_checkpoint(folder / "stage0-step000010", 512)
    for name, spread in (("stage0-step000020", 0.1), ("stage1-step000009", 0.2)):
        save_byte_checkpoint(folder / name, 512, initializer_range=spread)
    (folder / "notes").mkdir()
    asked = ("--suite", "perplexity,passkey", "--lengths", 400, "--text", text, "--rows", 2, "--samples", 2)
    assert run(folder, *asked, "--average", "--last", 2, "--out", out, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in said["checkpoints"]] == ["stage0-step000020", "stage1-step000009"]
    singles = []
    for name in ("stage0-step000020", "stage1-step000009"):
        assert run(folder / name, *asked, "--json") == 0
        singles.append(json.loads(capsys.readouterr().out)["results"])
        own = json.loads((out / name / "results.json").read_text())["results"]
        assert [r["score"] for r in own] == [r["score"] for r in singles[-1]]
    for mean, *each in zip(said["results"], *singles, strict=True):
        scores = [result["score"] for result in each]
        assert mean["score"] == pytest.approx(sum(scores) / 2)
        assert mean["details"]["spread"]["min"] == pytest.approx(min(scores))
        assert [c["score"] for c in mean["details"]["checkpoints"]] == pytest.approx(scores)
    assert run(first, *asked, "--average") == 2
    assert "has no checkpoints" in capsys.readouterr().err


def test_two_evaluations_are_compared_sample_by_sample(
    run: Run, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    other = save_byte_checkpoint(tmp_path / "other", 512, initializer_range=0.3)
    asked = ("--lengths", 400, "--text", text, "--rows", 3, "--samples", 2)
    assert run(checkpoint, *asked, "--out", a) == 0
    assert run(other, *asked, "--out", b) == 0
    capsys.readouterr()
    assert run("compare", a, b, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    perplexity, passkey = said["differences"]
    assert perplexity["difference"] == pytest.approx(
        100 * (perplexity["score_b"] / perplexity["score_a"] - 1), rel=1e-6
    )
    assert (passkey["difference"], passkey["p_value"], passkey["real"]) == (0, 1, False)
    assert run("compare", a, b, "--plot", tmp_path / "differences.png") == 0
    assert "differences are significant" in capsys.readouterr().out
    assert (tmp_path / "differences.png").stat().st_size > 1000
    assert run("compare", a, tmp_path) == 2
    assert "has no finished evaluation" in capsys.readouterr().err


def test_scores_are_computed_again_without_a_model(
    run: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_byte_checkpoint(tmp_path / "model", 512)
    out = tmp_path / "out"
    assert run(model, "--suite", "passkey", "--lengths", 400, "--samples", 3, "--out", out) == 0
    capsys.readouterr()
    shutil.rmtree(model)
    path = out / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["prediction"] = f"it is {lines[1]['references'][0]}, \x1b[31m<b>sure</b>"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("rescore", out, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["score"] == pytest.approx(100 / 3)
    page = (out / "report.html").read_text()
    assert "<b>sure</b>" not in page
    assert "ropewalk eval view, with the folder of this page, shows every answer" in page
    assert "\x1b" not in page
    path.write_text(json.dumps(lines[0]) + "\n")
    assert run("rescore", out) == 2
    assert "was computed from 3 predictions, but predictions.jsonl has 1" in capsys.readouterr().err


def test_view_writes_pages_and_opens_a_browser_only_for_someone_who_sees_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    write_predictions(tmp_path / "a" / "predictions.jsonl", [answered("one"), answered("two", index=1)])
    assert run("view", tmp_path / "a", "--json") == 0
    page = tmp_path / "a" / "answers" / "index.html"
    wanted = {"page": str(page), "samples": 2, "paired": 2, "whole_prompts": 0}
    assert json.loads(capsys.readouterr().out) == wanted
    assert run("view", tmp_path / "a", "--out", tmp_path / "a" / "answers") == 0
    assert capsys.readouterr().out == f"page  {page}\n"
    assert opened == []
    monkeypatch.setattr("ropewalk.cli.output.Terminal.is_terminal", True)
    assert run("view", tmp_path / "a", "--no-open") == run("view", tmp_path / "a", "--json") == 0
    assert opened == []
    assert run("view", tmp_path / "a") == 0
    assert opened == [page.as_uri()]
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert run("view", tmp_path / "a") == 0
    assert len(opened) == 1
    assert run("view", tmp_path) == 2
    assert "holds the mean of several checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "perplexity,pass-key"], "unknown --suite 'pass-key'; did you mean passkey?"),
        (["--suite", ","], "--suite: ',' is empty; give one or more values"),
        (["--lengths", "12q"], "'12q' is not a length"),
        (["--lengths", ","], "--lengths: ',' is empty; give one or more values"),
        (
            ["--lengths", "64", "--suite", "passkey"],
            "do not fit in 64 tokens with this tokenizer: passkey needs",
        ),
        (["--lengths", "1M", "--suite", "perplexity", "--beyond-config"], "too few for one row of 1048576"),
        (
            ["--lengths", "1k", "--suite", "passkey"],
            "the longest length is 1024 tokens, but the model's config states max_position_embeddings 512",
        ),
        (["--tasks", "passkeys"], "unknown task 'passkeys'; did you mean passkey"),
        (["--exclude", "vt"], "unknown task 'vt'; choose from perplexity, sliding"),
        (["--suite", "passkey", "--chat"], "the tokenizer has no chat template"),
        (["--suite", "lm_eval"], "give --lm-eval-tasks"),
        (["--lm-eval-data", "hellaswag"], "--lm-eval-data: 'hellaswag' is not of the form TASK=PATH"),
        (
            ["--lm-eval-data", "hellaswag=no/where"],
            "--lm-eval-data: the file or folder 'no/where' does not exist",
        ),
        (
            ["--suite", "needle", "--haystack", "hay"],
            "unknown --haystack 'hay'; choose from noise, essay, embedded",
        ),
        (["--compat", "yes"], "unknown --compat 'yes'; choose from none, nvidia"),
        (["--suite", "perplexity", "--tasks", "sliding", "--stride", "600"], "stride 600"),
        (["--suite", "longppl", "--lengths", "512"], "short_context 4096"),
        (["--suite", "longeval", "--lines", "20,x"], "--lines must be a whole number, got 'x'"),
        (["--threshold", "101"], "--threshold must be 100 or less, got 101"),
        (["--server-model", "m"], "--server-model m needs --server URL"),
        (["--average", "--server", "http://127.0.0.1:1/v1"], "remove --average or --server"),
        (["--text", "no/such.jsonl"], "no/such.jsonl"),
        (["--dtype", "int8"], "unknown --dtype 'int8'; choose from auto, float32"),
        (["--device", "gpu0"], "unknown device 'gpu0'"),
        (["--engine", "fast"], "unknown attention engine 'fast'"),
        (["--samples", "0", "--lengths", "512"], "--samples must be 1 or more, got 0"),
        (["--rows", "0"], "--rows must be 1 or more, got 0"),
        (["--out", __file__], "is a file, but must be a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    run: Run,
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    out = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    assert run(checkpoint, "--text", text, *out, *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_a_run_in_which_nothing_ran_is_no_success(
    run: Run, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, "--suite", "ruler", "--tasks", "qa_1", "--lengths", 512, "--json") == 1
    printed = capsys.readouterr()
    (result,) = json.loads(printed.out)["results"]
    assert (result["status"], result["score"]) == ("not run", None)
    assert "no task could run: SQuAD" in printed.err


def test_what_is_beyond_the_config_is_said(
    run: Run, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--suite", "passkey", "--lengths", "400,600", "--samples", 1)
    assert run(checkpoint, *asked, "--beyond-config") == 0
    assert "Beyond the config's max_position_embeddings of 512: 600 tokens" in capsys.readouterr().out


def test_a_folder_with_other_things_is_refused(
    run: Run, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert run(checkpoint, "--text", text, "--lengths", 512, "--out", tmp_path / "out") == 2
    assert "is not empty and contains no evaluation" in capsys.readouterr().err


def test_missing_model_is_named(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(tmp_path) == 2
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_mean_over_checkpoints_has_a_needle_grid_of_its_own(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "checkpoints", tmp_path / "out"
    for number in (1, 2):
        save_byte_checkpoint(folder / f"step-{number}", 512, initializer_range=0.1 * number)
    asked = ("--suite", "needle", "--lengths", 512, "--depths", 2, "--samples", 1)
    assert run(folder, *asked, "--average", "--out", out) == 0
    # A right answer of one checkpoint makes the two differ.
    path = out / "step-1" / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["prediction"], lines[0]["score"] = f" {lines[0]['references'][0]}.", 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "results.json").unlink()
    assert run(folder, *asked, "--average", "--out", out, "--json") == 0
    mean = json.loads(capsys.readouterr().out.split("report.html")[-1].strip())
    generated = mean["results"][0]
    assert [row["score"] for row in generated["details"]["depths"]] == [50, 0]
    assert generated["score"] == 25
    own = json.loads((out / "step-1" / "results.json").read_text())
    assert own["model"].endswith("step-1")
    assert own["results"][0]["score"] == 50
    assert len(own["model_sha256"]) == 64


def test_what_changes_the_results_is_another_evaluation(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, essays = save_byte_checkpoint(tmp_path / "model", 512), tmp_path / "essays.txt"
    essays.write_text("A sentence about nothing. " * 50)
    asked = (model, "--suite", "needle", "--haystack", "essay", "--essays", essays, "--lengths", 512)
    asked = (*asked, "--depths", 1, "--samples", 1, "--out", tmp_path / "out")
    assert run(*asked) == 0
    essays.write_text("Another sentence about nothing. " * 50)
    assert run(*asked) == 2
    assert "differs in haystack_sources" in capsys.readouterr().err
    essays.write_text("A sentence about nothing. " * 50)
    settings = model / "tokenizer_config.json"
    value = json.loads(settings.read_text())
    settings.write_text(json.dumps({**value, "bos_token": "</s>"}))
    assert run(*asked) == 2
    assert "differs in special_tokens" in capsys.readouterr().err


def test_data_for_a_task_that_does_not_run_are_named(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n")
    asked = ("--suite", "short", "--tasks", "hellaswag")
    assert run(checkpoint, *asked, "--lm-eval-data", f"helaswag={tmp_path / 'data.jsonl'}") == 2
    assert "did you mean hellaswag" in capsys.readouterr().err
