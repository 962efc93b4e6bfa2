"""``ropewalk search`` through the program's own main: a search on a tiny checkpoint, its log, and tables."""

import json
import math

import pytest

from ropewalk.attention.layout import IGNORED
from ropewalk.cli.app import main
from ropewalk.data import load_tokenizer
from ropewalk.io.lock import locked
from ropewalk.models import load as models
from ropewalk.rope import Default, LongRope, longrope_attention_factor
from ropewalk.search import ALGORITHMS, read_factors
from ropewalk.search import data as needles
from ropewalk.search.data import beginning, search_data
from ropewalk.search.goal import goal_of
from ropewalk.search.objective import ModelEvaluator
from ropewalk.search.settings import SearchSettings
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.cli.verify_command_cases import command

PAIRS = 4
"""Of the tiny checkpoint: heads of eight dimensions."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """64 tokens of stated context, weights large enough for RoPE to matter."""
    return save_byte_checkpoint(tmp_path_factory.mktemp("models") / "tiny", 64, initializer_range=0.3)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (json.dumps({"text": f"{n * n} " + "abc de fgh " * (20 + n)}) + "\n" for n in range(8))
    path.write_text("".join(lines))
    return path


@pytest.fixture
def search(checkpoint, text, tmp_path):
    """The command with a small search; arguments that come later win."""

    def run(*arguments, out=tmp_path / "factors.json"):
        small = ["--to", "128", "--budget", "40", "--documents", "2", "--held-out", "2", "--device", "cpu"]
        given = ["--text", text, "--out", out, *arguments]
        return main(["search", *map(str, [checkpoint, *small, "--algorithm", "evolution", *given])])

    return run


def data_of(text, checkpoint, length, trained=64, **settings):
    """What a search on a checkpoint of this trained length measures on."""
    goal = goal_of(Default(8, 1e4), trained, length)
    return search_data(str(text), load_tokenizer(str(checkpoint)), goal, SearchSettings(**settings))


def without_times(path):
    values = json.loads(path.read_text())
    del values["search"]["seconds"]
    return values


def test_json_is_the_file_and_holds_what_was_found(search, checkpoint, text, tmp_path, capsys):
    assert search("--json", "--plot", tmp_path / "search.png") == 0
    said = json.loads(capsys.readouterr().out)
    path = tmp_path / "factors.json"
    assert said.pop("file") == str(path)
    assert said == json.loads(path.read_text())
    assert (tmp_path / "search.png").stat().st_size > 1000
    table = read_factors(path)
    assert said["best"] == {
        "objective": min(point["objective"] for point in said["history"]),
        "rescale_factors": said["long_factor"],
        "start_tokens": 0,
    }
    assert set(said["baselines"]) == set(said["held_out"]["baselines"]) == {"pi", "ntk", "yarn"}
    # Seeds are the baselines brought to the grid of 0.01, so the result may be above them by that alone.
    assert said["best"]["objective"] < 1.01 * min(said["baselines"].values())
    assert said["forwards"] == 40
    assert said["search"]["ended_by"] == "budget"
    assert said["search"]["text"] == str(text)
    assert said["model"]["name"] == str(checkpoint)
    assert len(said["model"]["digest"]) == len(said["search"]["documents_sha256"]) == 64
    assert table.held_out.documents_sha256 != table.search.documents_sha256
    assert (table.target_length, table.model.original_max_position_embeddings) == (128, 64)
    assert len(table.long_factor) == PAIRS
    assert table.short_factor is None
    assert len((tmp_path / "factors.jsonl").read_text().splitlines()) == 1 + 40


def test_perplexities_are_those_of_the_model(search, checkpoint, text, tmp_path):
    """The file's numbers, computed again by nothing but transformers' loss on the same rows."""
    import torch

    from ropewalk.models.load import ModelSetup, load_model
    from ropewalk.rope import Linear

    assert search() == 0
    table = read_factors(tmp_path / "factors.json")
    rows = data_of(text, checkpoint, 128, documents=2, held_out=2)

    def perplexity(method, chosen):
        model = load_model(checkpoint, ModelSetup(rope=method, max_position_embeddings=128), device="cpu")
        losses, count = 0.0, 0
        for row in chosen:
            with torch.no_grad():
                logits = model(row.input_ids[None], layout=row.layout).logits[0].double()
            losses += torch.nn.functional.cross_entropy(
                logits, row.labels, ignore_index=IGNORED, reduction="sum"
            )
            count += int((row.labels != IGNORED).sum())
        return math.exp(losses / count)

    found = LongRope(8, 1e4, (1.0,) * PAIRS, table.long_factor, table.attention_factor, 64)
    # The losses are float32 sums over 250 targets; 1e-5 is a hundred times their rounding.
    assert perplexity(found, rows.rows) == pytest.approx(table.best.objective, rel=1e-5)
    assert perplexity(Linear(8, 1e4, 2.0), rows.rows) == pytest.approx(table.baselines["pi"], rel=1e-5)
    assert perplexity(found, rows.held_out) == pytest.approx(table.held_out.best, rel=1e-5)


def test_what_is_printed(search, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert search("--start-tokens", "4") == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "Perplexity at 128 tokens, before training"
    assert lines[1].split() == ["RoPE", "2", "search", "sequences", "2", "held-out", "sequences"]
    assert [line.split("  ")[0] for line in lines[2:6]] == ["factors found (n̂ = 4)", "PI", "NTK", "YaRN"]
    assert "40 forward passes" in printed.out
    assert "stopped by the budget" in printed.out
    assert "ropewalk extend" not in printed.out
    assert "The RoPE angles of the first 4 tokens stay unscaled" in printed.out
    assert "ropewalk export" not in printed.out
    assert f"--rope {tmp_path / 'factors.json'} --lengths 128" in printed.out
    assert "search: 40/40" in printed.err
    assert "best perplexity" in printed.err


@pytest.mark.parametrize("after", [1, 23])
def test_a_killed_search_goes_on_to_the_same_file(search, tmp_path, monkeypatch, capsys, after):
    whole, killed = tmp_path / "whole.json", tmp_path / "killed.json"
    assert search("--start-tokens", "search", out=whole) == 0
    asked = []
    losses = ModelEvaluator.losses

    def mortal(self, jobs):
        for each in losses(self, jobs):
            if len(asked) == after:
                raise KeyboardInterrupt
            asked.append(each)
            yield each

    with monkeypatch.context() as patch:
        patch.setattr(ModelEvaluator, "losses", mortal)
        assert search("--start-tokens", "search", out=killed) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: interrupted: the losses measured so far are in {tmp_path / 'killed.jsonl'}; run the same command with "
        "--resume to continue"
    )
    assert not killed.exists()
    assert search("--start-tokens", "search", out=killed) == 2
    assert "resume this search with --resume" in capsys.readouterr().err
    assert search("--start-tokens", "search", "--resume", "--batch", "3", out=killed) == 0
    told = capsys.readouterr().err
    assert f"resuming after {after} forward passes" in told
    assert f"search, after {after}: {40 - after}/{40 - after}" in told
    now, then = without_times(killed), without_times(whole)
    # Three candidates in one pass round otherwise than one by one: float32 losses, as above.
    assert now["best"]["objective"] == pytest.approx(then["best"]["objective"], rel=1e-5)
    assert now["long_factor"] == then["long_factor"]
    assert [point["forwards"] for point in now["history"]] == [point["forwards"] for point in then["history"]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resumed_alike_it_is_the_same_to_the_last_bit(search, tmp_path, algorithm):
    whole, killed = tmp_path / "whole.json", tmp_path / "killed.json"
    assert search("--algorithm", algorithm, out=whole) == 0
    lines = whole.with_suffix(".jsonl").read_text().splitlines(keepends=True)
    killed.with_suffix(".jsonl").write_text("".join(lines[:20]) + lines[20][:30])
    assert search("--algorithm", algorithm, "--resume", out=killed) == 0
    assert without_times(killed) == without_times(whole)
    assert killed.with_suffix(".jsonl").read_text() == whole.with_suffix(".jsonl").read_text()


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_log_without_its_first_line_is_begun_anew(search, tmp_path, options):
    (tmp_path / "factors.jsonl").touch()
    assert search(*options) == 0
    assert (tmp_path / "factors.json").is_file()


def test_ctrl_c_before_the_first_loss_says_that_nothing_is_lost(search, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropewalk.search.run.load_model", interrupt)
    assert search() == 130
    said = "error: interrupted: nothing is measured yet; run the same command to start again"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_other_text_does_not_go_on_with_the_log(search, text, tmp_path, capsys):
    assert search() == 0
    (tmp_path / "factors.json").unlink()
    other = tmp_path / "other.jsonl"
    # Not only in another order, in which the seed draws the same documents.
    other.write_text(text.read_text().replace("abc", "abd"))
    assert search("--resume", "--text", other) == 2
    assert "with documents_sha256" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_place_that_cannot_be_written_is_refused_before_the_search(search, tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / ("x.json" if option == "--out" else "x.png")
    assert search(option, str(path)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [f"error: cannot write {path}: Not a directory"]


@pytest.mark.parametrize(("said", "status"), [("128", 2), ("4", 0)])
def test_start_tokens_leave_something_to_scale(search, capsys, said, status):
    assert search("--start-tokens", said) == status
    assert (
        status == 0
    ) or "128 start tokens would leave all 128 positions unscaled" in capsys.readouterr().err


def test_another_search_does_not_go_on_with_the_log(search, tmp_path, capsys):
    assert search() == 0
    (tmp_path / "factors.json").unlink()
    for change, message in (
        (["--seed", "1"], "with seed 0 instead of 1"),
        (["--to", "256"], "with target_length 128 instead of 256"),
        (["--no-racing"], "with racing True instead of False"),
        (["--documents", "3"], "with documents 2 instead of 3"),
    ):
        assert search("--resume", *change) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    # The budget decides where a search ends, and nothing before.
    assert search("--resume", "--budget", "60") == 0
    assert read_factors(tmp_path / "factors.json").forwards == 60


@pytest.mark.slow
def test_two_processes_find_what_one_finds(two_ranks, search, checkpoint, text, tmp_path):
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    assert search("--batch", "2", out=alone) == 0
    small = ["--to", "128", "--budget", "40", "--documents", "2", "--held-out", "2", "--device", "cpu"]
    line = [
        "search",
        checkpoint,
        *small,
        "--algorithm",
        "evolution",
        "--text",
        text,
        "--batch",
        "2",
        "--out",
        together,
    ]
    (status, said), (other, nothing) = two_ranks.run(command, [*map(str, line), "--json"])
    assert (status, other, nothing) == (0, 0, "")
    assert without_times(together) == without_times(alone)
    assert json.loads(said)["best"] == without_times(alone)["best"]


def test_the_needle_objective_scores_answers_alone(search, tmp_path):
    assert (
        search("--objective", "needle", "--to", "2k", "--documents", "1", "--held-out", "1", "--budget", "4")
        == 0
    )
    table = read_factors(tmp_path / "factors.json")
    assert table.search.objective == "needle"
    assert table.held_out.documents == 1


def test_needles_are_hidden_in_other_documents_where_held_out(checkpoint, text, monkeypatch):
    given = []
    monkeypatch.setattr(needles, "needle_rows", lambda *arguments: given.append(arguments) or [])
    data_of(text, checkpoint, 2048, 256, objective="needle", documents=3, held_out=2)
    (_, own, length, count, seed, hidden), (_, other, _, held_out, other_seed, _) = given
    assert hidden.beyond == 256
    assert (length, count, held_out) == (2048, 3, 2)
    assert seed != other_seed
    assert own
    assert other
    assert not set(own) & set(other)
    data_of(text, checkpoint, 2048, 256, objective="needle", documents=3, held_out=0)
    assert len(given) == 3
    assert set(given[-1][1]) == {*own, *other}


def test_help_names_the_other_commands(capsys):
    assert main(["search", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Usage: ropewalk search [OPTIONS]" in printed
    assert "ropewalk search show" in printed
    assert "ropewalk search import" in printed
    for name in ALGORITHMS:
        assert name in printed


def test_a_short_penalty_measures_the_beginnings_too(search, checkpoint, text, tmp_path):
    assert search("--short-penalty", "0.5") == 0
    table = read_factors(tmp_path / "factors.json")
    assert (table.search.documents, table.search.short_penalty) == (4, 0.5)
    rows = data_of(text, checkpoint, 128, documents=2, held_out=0, short_penalty=0.5)
    for row, short in zip(rows.rows, rows.short_rows, strict=True):
        assert short.input_ids.tolist() == row.input_ids[:64].tolist()
        # The last token's target lies beyond the beginning, and has none there.
        assert short.labels[:63].tolist() == row.labels[:63].tolist()
        assert short.labels[63] == IGNORED


def test_the_beginning_of_joined_documents_keeps_them_apart(checkpoint, text):
    rows = data_of(text, checkpoint, 1024, documents=1, held_out=0)
    assert rows.joined
    (row,) = rows.rows
    cut = beginning(row, 600)
    assert cut.layout.document_ids.tolist() == row.layout.document_ids[:600].tolist()
    assert cut.labels[:599].tolist() == row.labels[:599].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "64"], "the checkpoint is trained for 64 tokens; give a target length above 64 tokens"),
        (["--to", "lots"], "'lots' is not a length"),
        (["--algorithm", "guess"], "unknown --algorithm 'guess'; choose from cma-es, evolution"),
        (["--objective", "needles"], "unknown --objective 'needles'; did you mean needle?"),
        (["--dtype", "int8"], "unknown --dtype 'int8'; choose from auto, float32, bfloat16, float16"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (
            ["--start-tokens", "few"],
            "--start-tokens must be a number of tokens (0 or more) or the word 'search', got 'few'",
        ),
        (["--largest", "0.5"], "--largest must be 1 or more, got 0.5"),
        (["--attention-factor", "0"], "attention_factor"),
        (["--short-penalty", "-1"], "--short-penalty must be 0 or more, got -1"),
        (
            ["--budget", "5"],
            "a budget of 5 forward passes is too small for the 3 initial candidates on 2 documents each; "
            "either raise budget (--budget) to 6 or more",
        ),
        (
            ["--budget", "11", "--short-penalty", "1"],
            "on 4 documents each; either raise budget (--budget) to 12 or more",
        ),
        (["--documents", "30", "--budget", "90"], "but the search needs 30"),
        (["--text", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--out", "factors.jsonl"], "--out factors.jsonl: the name of a factor table must end in .json"),
        (["--out", "factors"], "the name of a factor table must end in .json"),
        (["--plot", "search.pdf"], "a figure is written as .png or .svg"),
        (["--resume"], "nothing to resume: the log"),
        (["--budget", "0"], "--budget"),
        (["--prefill-chunk", "none"], "'none' is not a length"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(search, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert search(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    errors = printed.err.splitlines()
    assert errors[-1].startswith("error: ")
    assert message in errors[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_is_there_is_not_overwritten(search, tmp_path, capsys):
    (tmp_path / "factors.json").write_text("mine")
    assert search() == search("--resume") == 2
    assert "factors.json already exists" in capsys.readouterr().err
    assert (tmp_path / "factors.json").read_text() == "mine"


def test_a_finished_search_is_shown_again_and_measures_nothing(search, tmp_path, capsys, monkeypatch):
    assert search() == 0
    shown = capsys.readouterr().out
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    # Whatever is measured needs the model.
    monkeypatch.delattr("ropewalk.search.run.load_model")
    assert search("--resume") == 0
    again = capsys.readouterr()
    assert again.out == shown
    assert "the search is finished; its result is in" in again.err
    # Another search does not have this result.
    for option, value, was in (("--budget", 50, 40), ("--seed", 1, 0), ("--to", 256, 128)):
        assert search("--resume", option, value) == 2
        assert f" {was} instead of {value}; remove it or give another --out" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_smallest_budget_is_known_before_the_model_loads(search, monkeypatch, tmp_path, capsys):
    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    with monkeypatch.context() as patch:
        patch.setattr(models, "load_model", loaded)
        assert search("--budget", "5") == 2
    assert "raise budget (--budget) to 6 or more" in capsys.readouterr().err
    assert search("--budget", "6", "--held-out", "0") == 0
    table = read_factors(tmp_path / "factors.json")
    # Above the baselines by rounding to the grid, and their own attention factors, alone.
    assert table.best.objective < 1.01 * min(table.baselines.values())


def test_a_log_that_another_process_writes_is_left_alone(search, tmp_path, capsys):
    assert search() == 0
    (tmp_path / "factors.json").unlink()
    log = tmp_path / "factors.jsonl"
    before = log.read_text()
    with locked(tmp_path, file=log.name):
        assert search("--resume") == 2
    assert " is writing to " in capsys.readouterr().err.splitlines()[-1]
    assert log.read_text() == before


def test_a_log_of_more_rows_than_there_are_is_damaged(search, tmp_path, capsys):
    assert search() == 0
    (tmp_path / "factors.json").unlink()
    log = tmp_path / "factors.jsonl"
    log.write_text(log.read_text().replace('"document": 1', '"document": 2'))
    assert search("--resume") == 2
    assert (
        "document 2 does not exist; the search has documents 0 to 1"
        in capsys.readouterr().err.splitlines()[-1]
    )


def test_losses_that_are_no_numbers_are_a_failure(search, monkeypatch, capsys):
    monkeypatch.setattr(ModelEvaluator, "_losses", lambda self, methods, _: [math.inf] * len(methods))
    assert search() == 1
    assert "the loss of every candidate is NaN or infinite" in capsys.readouterr().err


def test_infinite_baselines_are_null(search, monkeypatch, tmp_path, capsys):
    measured = ModelEvaluator.baseline
    monkeypatch.setattr(
        ModelEvaluator,
        "baseline",
        lambda self, method: math.inf if method.name == "linear" else measured(self, method),
    )
    assert search() == 0
    assert read_factors(tmp_path / "factors.json").baselines["pi"] is None
    assert "∞" in capsys.readouterr().out


def test_the_embedded_model_is_searched_by_either_name_of_the_command(tmp_path, capsys):
    out = tmp_path / "factors.json"
    few = ["--to", "512", "--budget", "3", "--documents", "1", "--held-out", "1", "--device", "cpu"]
    assert main(["search", "run", "embedded", *few, "--out", str(out)]) == 0
    table = read_factors(out)
    assert (table.model.name, table.target_length, len(table.long_factor)) == ("embedded", 512, 16)
    assert f"ropewalk export embedded --rope {out}" in capsys.readouterr().out


def test_short_factors_of_a_longrope_checkpoint(checkpoint, text, tmp_path, capsys):
    import shutil

    longer = tmp_path / "longer"
    shutil.copytree(checkpoint, longer)
    config = json.loads((longer / "config.json").read_text())
    long = [1.0, 1.5, 1.8, 2.0]
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": long,
        "short_factor": [1.0] * PAIRS,
        "original_max_position_embeddings": 64,
    }
    config["max_position_embeddings"] = 128
    (longer / "config.json").write_text(json.dumps(config))
    out = tmp_path / "short.json"
    line = ["search", longer, "--to", "48", "--text", text, "--budget", "9", "--documents", "1", "--out", out]
    assert main([*map(str, line), "--short-penalty", "1"]) == 2
    assert "--short-penalty 1 applies to long factors only" in capsys.readouterr().err
    assert main([*map(str, line), "--start-tokens", "4"]) == 2
    assert "a search for short factors cannot have start tokens, got 4" in capsys.readouterr().err
    assert main([*map(str, line), "--device", "cpu", "--held-out", "0"]) == 0
    assert "no text was held out" in capsys.readouterr().out
    table = read_factors(out)
    assert set(table.baselines) == {"original", "long"}
    assert table.long_factor is None
    own = longrope_attention_factor(2, 64)
    assert max(table.short_factor) <= 1.25
    assert table.method(LongRope(8, 1e4, (1.0,) * 4, tuple(long), own, 64), 128).long_factor == tuple(long)
    assert main(["search", "show", str(out)]) == 0
    printed = capsys.readouterr().out
    assert ["pair", "period", "found", "original", "long"] in [line.split() for line in printed.splitlines()]
    assert "NTK" not in printed


def test_show_says_what_a_table_is(search, tmp_path, capsys):
    assert search("--start-tokens", "2", "--attention-factor", "1.2") == 0
    capsys.readouterr()
    path, picture = tmp_path / "factors.json", tmp_path / "shown.svg"
    assert main(["search", "show", str(path), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    for word in (
        "target        128 tokens",
        "4 pairs, base 10,000, original length 64 tokens",
        "exportable    no, because of the start tokens",
        "The attention factor 1.2 is not the published",
        "2 held-out sequences",
    ):
        assert word in printed
    assert "<svg" in picture.read_text()
    assert main(["search", "show", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits_config"] is False
    assert said["rules"]["pi"] == [2.0] * PAIRS
    assert len(said["remarks"]) == 2
