"""Four processes measure what one measures: perplexity, teacher-forced retrieval, the probe, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.attention.layout import IGNORED
from ropewalk.data import SourceSpec, load_tokenizer
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation import ModelUnderTest, PromptEncoder, Settings, evaluate_model, evaluation_rows
from ropewalk.evaluation.backends import argmax_matches
from ropewalk.evaluation.backends.in_memory import greedy_ids
from ropewalk.evaluation.backends.likelihoods import row_losses
from ropewalk.evaluation.backends.sharded import ShardedBackend, row_losses_of
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.rope_probe import probe_model
from ropewalk.evaluation.rows import documents_of
from ropewalk.evaluation.suite_loop import check_evaluation
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.evaluation.tasks.registry import chosen_tasks
from ropewalk.evaluation.tasks.teacher_forced import prompt_and_target_ids
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.rope import Default, DynamicNtk, LongRope
from tests.evaluation.sharded_evaluation_cases import (
    command,
    damaged,
    evaluated,
    likeliest,
    losses,
    probed,
    without_memory,
)

FOLDER = demo_model_path()
MESHES = [{"ring": 2, "sequence": 2}, {"shard": 2, "sequence": 2}]


def check_sharded(tokenizer: Any, settings: Settings, documents: Any, stated: int) -> None:
    """What is refused before the model is loaded."""
    under_test = ModelUnderTest(tokenizer, ShardedBackend({}), None, stated, sharded=True)
    check_evaluation(under_test, settings, documents)


SETTINGS = Settings(
    suites=("perplexity", "needle", "passkey"),
    tasks=("perplexity", "teacher_forced"),
    # Odd ones: no degree divides them. At 321 the demo model says some keys and some not.
    lengths={"perplexity": (61, 401), "needle": (251,), "passkey": (321,)},
    samples=4,
    depths=2,
    rows=3,
    beyond_config=True,
)
LOSS_TOLERANCE = 1e-5
"""Relative, of a perplexity: losses of about 4 nats in float32 differ by 1e-6 each where products have other shapes."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(FOLDER))


@pytest.fixture(scope="module")
def documents(tokenizer: Any) -> Any:
    return documents_of([SourceSpec(path="embedded:validation")], tokenizer, 401, 3, seed=0)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def alone(model: Any, tokenizer: Any, documents: Any) -> dict[Any, TaskResult]:
    """What one process finds; passkeys are generated there."""
    asked = Settings(**{**SETTINGS.to_json(), "tasks": ("perplexity", "teacher_forced", "passkey")})
    found = evaluate_model(ModelUnderTest.in_memory(model, tokenizer), asked, documents)
    return {(result.suite, result.length): result for result in found}


def assert_same_perplexity(result: TaskResult, other: TaskResult) -> None:
    assert (result.n, result.details, result.reason) == (other.n, other.details, other.reason)
    assert result.score == pytest.approx(other.score, rel=LOSS_TOLERANCE)
    assert result.ci95 == pytest.approx(other.ci95, rel=LOSS_TOLERANCE)
    for one, two in zip(result.positions, other.positions, strict=True):
        assert (one.start, one.end, one.n_tokens, one.n_windows) == (
            two.start,
            two.end,
            two.n_tokens,
            two.n_windows,
        )
        assert one.perplexity == pytest.approx(two.perplexity, rel=LOSS_TOLERANCE)
        assert one.ci95 == pytest.approx(two.ci95, rel=LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_mesh_measures_what_one_process_does(
    four_ranks: Any, alone: dict[Any, TaskResult], documents: Any, shape: dict[str, int]
) -> None:
    found = four_ranks.run(evaluated, shape, FOLDER, SETTINGS, documents, shape != MESHES[1])
    for other, untouched in found:
        assert untouched
        assert other == found[0][0]
    values, calls = found[0][0]
    results = [TaskResult.from_json(value) for value in values]
    assert [(r.suite, r.task, r.length) for r in results] == [
        ("perplexity", "perplexity", 61),
        ("perplexity", "perplexity", 401),
        ("needle", "teacher_forced", 251),
        ("passkey", "teacher_forced", 321),
    ]
    for result in results[:2]:
        assert_same_perplexity(result, alone["perplexity", result.length])
    assert results[2].to_json() == alone["needle", 251].to_json()
    # Some digits are right and others are not, or the equality would say nothing.
    assert 0 < results[2].details["tokens_right"] < 100
    assert calls[:3] == [("perplexity at 61 tokens", done, 3) for done in (1, 2, 3)]
    assert calls[-1] == ("passkey teacher_forced at 321 tokens", 4, 4)


@pytest.mark.slow
def test_passkey_is_right_where_generation_says_it(
    four_ranks: Any, model: Any, tokenizer: Any, alone: dict[Any, TaskResult]
) -> None:
    asked = Settings(suites=("passkey",), lengths=(321,), samples=4, beyond_config=True)
    result = TaskResult.from_json(four_ranks.run(evaluated, {"sequence": 4}, FOLDER, asked, None)[0][0][0][0])
    encoder = PromptEncoder(tokenizer)
    said, shares = [], []
    for sample in PasskeyTask().samples(encoder, 321, 4, 0):
        ids, start = prompt_and_target_ids(encoder, sample)
        matches = argmax_matches(model, ids, start, 321)
        shares.append(sum(matches) / len(matches))
        new = greedy_ids(model, [ids[:start]], len(ids) - start, 321, frozenset())[0]
        said.append(100.0 * (new == list(ids[start:])))
    assert [each["score"] for each in result.samples] == said
    assert {0.0, 100.0} == set(said)
    assert result.details["tokens_right"] == pytest.approx(100 * sum(shares) / 4)
    generated = alone["passkey", 321]
    assert [each["score"] for each in generated.samples] == said
    # Nobody takes the one for the other.
    assert (result.task, generated.task) == ("teacher_forced", "passkey")
    assert result.details["scored"] == "teacher-forced"
    assert "depths" not in result.details
    assert result.details["samples_sha256"] == generated.details["samples_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["positions", "order"])
def test_a_mesh_that_is_wrong_measures_something_else(
    four_ranks: Any, alone: dict[Any, TaskResult], documents: Any, mutation: str
) -> None:
    asked = Settings(**{**SETTINGS.to_json(), "lengths": {"perplexity": (61,), "needle": (251,)}})
    asked = Settings(**{**asked.to_json(), "suites": ("perplexity", "needle")})
    found = four_ranks.run(evaluated, {"sequence": 4}, FOLDER, asked, documents, True, mutation)
    perplexity, needle = (TaskResult.from_json(value) for value in found[0][0][0])
    pairs = zip(perplexity.positions, alone["perplexity", 61].positions, strict=True)
    worst = max(abs(one.perplexity / two.perplexity - 1) for one, two in pairs)
    assert not worst <= 100 * LOSS_TOLERANCE
    assert needle.details["tokens_right"] != alone["needle", 251].details["tokens_right"]


@pytest.mark.slow
def test_likeliest_tokens_are_those_of_greedy_generation(four_ranks: Any, model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts, expected = [], []
    # An odd number of rows: one group of two has nothing to do in the end.
    for length, wrongs in ((37, (None, 0)), (20, (4,)), (5, (8, None)), (64, (0, None)), (11, (8, 4))):
        prompt = torch.randint(3, 1500, (length,), generator=generator).tolist()
        said = greedy_ids(model, [prompt], 9, length + 9, frozenset())[0]
        for wrong in wrongs:
            row = [*prompt, *said]
            if wrong is not None:
                row[length + wrong] = (row[length + wrong] + 1) % 1536
            prompts.append((row, length))
            expected.append((said, wrong))
    for shape in ({"shard": 2, "sequence": 2}, {"sequence": 4}):
        for rank, (found, untouched) in enumerate(four_ranks.run(likeliest, shape, FOLDER, prompts)):
            assert untouched, rank
            for tokens, (row, length), (said, wrong) in zip(found, prompts, expected, strict=True):
                upto = 9 if wrong is None else wrong + 1
                assert tokens[:upto] == said[:upto]
                matches = [token == true for token, true in zip(tokens, row[length:], strict=True)]
                assert matches == argmax_matches(model, row, length)
                assert all(matches) == (wrong is None)


@pytest.mark.parametrize("shape", [{"replicate": 2, "sequence": 2}, {"shard": 4}], ids=str)
def test_rows_of_any_lengths_have_the_losses_of_one_process(
    four_ranks: Any, model: Any, documents: Any, shape: dict[str, int]
) -> None:
    rows = [evaluation_rows(documents, length, 0, None, 1).rows[0] for length in (33, 60, 7, 8, 41)]
    head = OutputHead.of(model)
    with torch.no_grad():
        expected = [row_losses(model, head, row) for row in rows]
    for found, untouched in four_ranks.run(losses, shape, FOLDER, rows):
        assert untouched
        for one, two, row in zip(found, expected, rows, strict=True):
            assert one.shape == two.shape
            # Logits of 10 in float32: an ulp is 1e-6, and the loss is a difference of two of them.
            assert one == pytest.approx(two, abs=1e-5)
            assert (one[(row.labels == IGNORED).numpy()] == 0).all()


@pytest.mark.slow
def test_probe_finds_the_same_over_ranks(four_ranks: Any, model: Any, documents: Any) -> None:
    rows = evaluation_rows(documents, 301, 0, None, 3).rows
    candidates = {
        "current": Default(32, 1e4),
        "theta": Default(32, 2e4),
        "dynamic": DynamicNtk(32, 1e4, 4.0, 256),
    }
    alone = probe_model(model, candidates, rows, 256)
    for (found, calls), untouched in four_ranks.run(
        probed, {"shard": 2, "sequence": 2}, FOLDER, candidates, rows, 256
    ):
        assert untouched
        assert calls == [(done, 9) for done in range(1, 10)]
        assert [each.name for each in found] == [each.name for each in alone]
        for one, two in zip(found, alone, strict=True):
            # A loss in nats is the logarithm of what the tolerance is of.
            assert one.loss == pytest.approx(two.loss, abs=LOSS_TOLERANCE)
            assert one.beyond_loss == pytest.approx(two.beyond_loss, abs=LOSS_TOLERANCE)
            assert one.difference_ci95 == pytest.approx(two.difference_ci95, abs=2 * LOSS_TOLERANCE)
    assert row_losses_of(LossModel(model, OutputHead.of(model)), None) is None


def test_a_rope_that_depends_on_the_length_is_that_of_the_whole_length(
    four_ranks: Any, tokenizer: Any
) -> None:
    """Prompt and answer are up to 256 tokens, and the length is 260: the long factors, also for the shards."""
    rope = LongRope(32, 1e4, (1.0,) * 16, (2.0,) * 16, 1.0, 256)
    model, encoder = (
        load_model(FOLDER, ModelSetup(rope=rope, max_position_embeddings=1024)),
        PromptEncoder(tokenizer),
    )
    asked = Settings(suites=("passkey",), lengths=(260,), samples=3, beyond_config=True)
    found = four_ranks.run(evaluated, {"sequence": 4}, FOLDER, asked, None, True, None, rope)[0][0][0][0]
    shares = {}
    for length in (260, 256):
        matches = []
        for sample in PasskeyTask().samples(encoder, 260, 3, 0):
            ids, start = prompt_and_target_ids(encoder, sample)
            assert len(ids) <= 256
            right = argmax_matches(model, ids, start, length)
            matches.append(sum(right) / len(right))
        shares[length] = 100 * sum(matches) / 3
    assert found["details"]["tokens_right"] == pytest.approx(shares[260])
    assert abs(shares[260] - shares[256]) > 10


def test_logits_that_are_no_numbers_are_said_once(four_ranks: Any) -> None:
    found = four_ranks.run(damaged, {"sequence": 4}, FOLDER, list(range(3, 20)))
    assert [name for name, _ in found] == ["RunFailure", "Echo", "Echo", "Echo"]
    assert "logits are NaN" in found[0][1]


def test_a_memory_that_gives_out_ends_the_run(four_ranks: Any) -> None:
    for said in four_ranks.run(without_memory, {"sequence": 4}, FOLDER, list(range(3, 20))):
        assert said.startswith("out of memory on cpu with 5 of the 17 tokens of a row; use more processes")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"suites": ("perplexity", "ruler")},
            "the suite ruler cannot be measured by several processes; run the suite in one process, or on a server",
        ),
        (
            {"suites": ("longppl",)},
            "the suite longppl cannot be measured by several processes; run the suite in one process$",
        ),
        (
            {"suites": ("short",)},
            "the suite short cannot be measured by several processes; run the suite in one process$",
        ),
        (
            {"tasks": ("sliding",)},
            "only the task perplexity of the suite perplexity, not sliding; run sliding in one process",
        ),
        (
            {"tasks": ("generated",)},
            "only the task teacher_forced of the suite needle, not generated; run generated",
        ),
        (
            {"tasks": ("passkey",)},
            "only the task teacher_forced of the suite passkey, not passkey; run passkey in one process",
        ),
        ({"tasks": ("teacher_forcd",)}, "unknown task 'teacher_forcd'; did you mean teacher_forced"),
        (
            {"exclude": ("teacher_forced", "perplexity")},
            "--exclude teacher_forced,perplexity leaves no task to run",
        ),
        ({"lengths": ()}, "the suite perplexity needs lengths"),
        (
            {"lengths": (512,)},
            "length is 512 tokens, but the model's config states max_position_embeddings 256",
        ),
        (
            {"lengths": (100,)},
            r"prompts do not fit in 100 tokens .*teacher_forced of the suite needle needs \d+",
        ),
        (
            {"lengths": {"perplexity": (250,), "needle": (250,), "passkey": (60,)}},
            r"prompts do not fit in 60 tokens .*teacher_forced of the suite passkey needs \d+",
        ),
    ],
)
def test_what_several_processes_cannot_measure_is_refused(
    tokenizer: Any, documents: Any, fields: dict[str, Any], message: str
) -> None:
    asked = {
        "suites": ("perplexity", "needle", "passkey"),
        "lengths": (250,),
        "samples": 2,
        "depths": 2,
        **fields,
    }
    with pytest.raises(RopewalkError, match=message):
        check_sharded(tokenizer, Settings(**asked), documents, 256)


def test_texts_that_are_too_short_are_refused_and_none_is_said(
    four_ranks: Any, tokenizer: Any, documents: Any
) -> None:
    asked = Settings(suites=("perplexity",), lengths=(250,))
    with pytest.raises(RopewalkError, match="too few for one row of 250"):
        check_sharded(tokenizer, asked, [documents[0][:9]], 256)
    check_sharded(tokenizer, asked, None, 256)
    found = four_ranks.run(evaluated, {"sequence": 4}, FOLDER, asked, None)[3][0][0][0]
    assert (found["status"], found["reason"], found["unit"]) == ("not run", "no text was given", "perplexity")


def test_tasks_narrow_and_exclude() -> None:
    suites = ("passkey", "perplexity", "needle")
    each = {"passkey": ["teacher_forced"], "perplexity": ["perplexity"], "needle": ["teacher_forced"]}
    assert chosen_tasks(Settings(suites=suites), sharded=True) == each
    assert chosen_tasks(Settings(suites=suites, tasks=("teacher_forced",)), sharded=True) == each
    left = chosen_tasks(Settings(suites=suites, exclude=("teacher_forced", "generated")), sharded=True)
    assert left == {"passkey": [], "perplexity": ["perplexity"], "needle": []}


def test_a_sharded_model_generates_nothing() -> None:
    with pytest.raises(EngineError, match="over several processes cannot generate answers"):
        ShardedBackend({}).answers([])


@pytest.mark.slow
def test_the_command_writes_and_says_everything_once(
    two_ranks: Any, tmp_path: Path, alone: dict[Any, TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results"
    asked = [
        "eval",
        "embedded",
        "--suite",
        "perplexity,needle",
        "--lengths",
        "251",
        "--rows",
        "3",
        "--depths",
        "2",
    ]
    asked += [
        "--samples",
        "4",
        "--samples-dir",
        str(tmp_path / "samples"),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    (status, said, _), second = two_ranks.run(command, asked)
    assert status == 0
    assert second == (0, "", "")
    assert "Needle in repeated noise, teacher-forced" in said
    record = json.loads((out / "results.json").read_text())
    assert record["parallel"] == record["backend"]["parallel"] == "2 sequence"
    perplexity, needle = (TaskResult.from_json(each) for each in record["results"])
    assert perplexity.score > 1
    assert needle.details == alone["needle", 251].details | {"beyond_config": False}
    # The same command goes on, on another mesh too: what was measured is not measured again.
    finished = (out / "finished.jsonl").read_bytes()
    (status, said, _), second = two_ranks.run(command, [*asked, "--parallel", "shard=2", "--json"])
    assert (status, second) == (0, (0, "", ""))
    assert json.loads(said)["results"] == record["results"]
    assert (out / "finished.jsonl").read_bytes() == finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--suite", "ruler"), "error: the suite ruler cannot be measured by several processes"),
        (("--dtype", "int"), "error: unknown --dtype 'int'"),
        (
            ("--parallel", "sequence=4"),
            "error: --parallel sequence=4 needs 4 processes, but torchrun started 2",
        ),
        (("--average",), "error: --average needs a single process"),
        (("--parallel", "ring=2", "--engine", "flex"), "error: engine flex needs all keys of a row at once"),
    ],
)
def test_the_command_refuses_once(two_ranks: Any, options: tuple[str, ...], message: str) -> None:
    first, second = two_ranks.run(command, ["eval", "embedded", "--lengths", "251", *options])
    assert second == (2, "", "")
    assert (first[0], first[1]) == (2, "")
    assert first[2].startswith(message)
    assert first[2].count("error") == 1
