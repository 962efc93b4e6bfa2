"""evaluate: every suite, every length, in order; what cannot run is said and never scored; a run goes on."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path, embedded_documents
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation import ModelUnderTest, Settings, Stores, TaskResult, evaluate_model
from ropewalk.evaluation.backends import Answer, GenerationRequest, Rejection
from ropewalk.evaluation.predictions import PredictionLog
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import result_log
from ropewalk.evaluation.suite_loop import check_evaluation
from ropewalk.evaluation.tasks.generation import generated_predictions
from ropewalk.evaluation.tasks.ruler.tasks import PUBLISHED
from ropewalk.models.load import attach
from tests.evaluation import core_cases
from tests.evaluation.core_cases import CHAT, asked_sample
from tests.evaluation.evaluation_cases import byte_tokenizer, tiny_llama, word_tokenizer

DOCUMENTS = [np.random.default_rng(3).integers(0, 250, size=n) for n in (300, 90, 400)]
BEYOND = Settings(beyond_config=True, samples=2, rows=3)


def changed(asked: Settings, **changes: Any) -> Settings:
    return Settings(**{**asked.to_json(), **changes})


def settings(**changes: Any) -> Settings:
    return changed(BEYOND, **changes)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="module")
def under_test(tokenizer: Any) -> ModelUnderTest:
    model = tiny_llama(vocab_size=len(tokenizer))
    attach(model)
    return ModelUnderTest.in_memory(model, tokenizer)


class Served:
    """A server that says 7, until it has answered ``most`` prompts."""

    def __init__(self, most: float = math.inf) -> None:
        self.most, self.asked = most, 0
        self.description = {"kind": "server"}

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        for index in reversed(range(len(requests))):
            if self.asked >= self.most:
                raise RunFailure("the server stopped answering")
            self.asked += 1
            yield Answer(index, " 7", 1, True)


def test_every_suite_at_every_length(under_test: ModelUnderTest) -> None:
    told: list[tuple[str, int, int]] = []
    results = evaluate_model(
        under_test, settings(lengths=(96, 192)), DOCUMENTS, progress=lambda *call: told.append(call)
    )
    assert [(r.suite, r.task, r.length, r.status, r.unit) for r in results] == [
        ("perplexity", "perplexity", 96, "ok", "perplexity"),
        ("perplexity", "perplexity", 192, "ok", "perplexity"),
        ("passkey", "passkey", 96, "ok", "percent"),
        ("passkey", "passkey", 192, "ok", "percent"),
    ]
    short, long, passkeys = results[0], results[1], results[2:]
    assert ("preparing prompts: passkey at 96 tokens", 0, passkeys[0].n) in told
    assert [each.end for each in long.positions] == [64, 80, 96, 112, 128, 160, 192]
    assert short.n == long.n == 3
    assert short.score > 0
    # The rows' losses are those that the score is made of.
    nats, tokens = (sum(each[key] for each in long.samples) for key in ("nats", "tokens"))
    assert long.score == pytest.approx(math.exp(nats / tokens))
    assert long.details["n_tokens"] == tokens
    assert (long.details["max_position_embeddings"], long.details["beyond_config"]) == (64, True)
    for result in passkeys:
        assert result.n == len(result.samples) == 2
        assert result.details["beyond_config"]
        assert result.details["bos_count"] == [1]
        assert result.details["prompt_tokens"][1] <= result.length - 10
    for result in results:
        json.dumps(result.to_json(), allow_nan=False)
    assert told[0] == ("perplexity at 96 tokens", 1, 3)
    assert told[-1] == ("passkey at 192 tokens", 2, 2)


def test_perplexity_has_three_forms_with_both_averages(under_test: ModelUnderTest) -> None:
    asked = settings(
        suites=("perplexity",), tasks=("sliding", "truncated"), lengths=(96,), stride=32, most_windows=3
    )
    sliding, truncated = evaluate_model(under_test, asked, DOCUMENTS)
    assert [r.task for r in (sliding, truncated)] == ["sliding", "truncated"]
    assert sliding.details["stride"] == 32
    assert sliding.details["n_windows"] == 7  # 3 of each long document, 1 of the one of 90 tokens
    assert truncated.details["n_windows"] == 3
    for result in (sliding, truncated):
        assert result.details["published"] > 0
        assert len(result.samples) == 3
        assert len(result.details["samples_sha256"]) == 64


def test_longppl_runs_with_the_model_itself(under_test: ModelUnderTest) -> None:
    asked = settings(suites=("longppl",), lengths=(200,), short_context=32)
    (result,) = evaluate_model(under_test, asked, DOCUMENTS)
    # A random model has no use for context; then it says so.
    assert result.status == "not run" or result.details["n_key_tokens"] > 0
    assert result.details["evaluator"] == "the model itself"
    assert result.details["step"] == 8


def test_longppl_takes_key_tokens_from_a_model_with_another_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer))
    attach(model)
    under_test, evaluator = ModelUnderTest.in_memory(model, tokenizer), str(demo_model_path())
    assert load_tokenizer(evaluator).get_vocab() != under_test.tokenizer.get_vocab()
    (document,) = list(embedded_documents("validation"))[:1]
    ids = np.array(under_test.tokenizer(document.text, add_special_tokens=False)["input_ids"])
    asked = settings(suites=("longppl",), lengths=(600,), short_context=16, evaluator=evaluator)
    (result,) = evaluate_model(under_test, asked, [ids])
    assert (result.status, result.details["mapping"]) == ("ok", "characters")
    assert result.details["n_key_tokens"] > 0
    # A token a byte here; fewer there, so that the same text is compared from a later token on.
    assert result.details["evaluator_tokens"] < result.details["n_tokens"] == 600 - 1
    with pytest.raises(
        RopewalkError,
        match=rf"more than 500 tokens .* of the evaluator '{evaluator}'; after .* texts has \d+",
    ):
        check_evaluation(under_test, changed(asked, short_context=400), [ids])


def test_needle_grid_by_answers_and_by_teacher_forcing(under_test: ModelUnderTest) -> None:
    results = evaluate_model(
        under_test, settings(suites=("needle",), lengths=(360, 500), depths=3, samples=1)
    )
    assert [(r.task, r.length, r.n) for r in results] == [
        ("generated", 360, 3),
        ("generated", 500, 3),
        ("teacher_forced", 360, 3),
        ("teacher_forced", 500, 3),
    ]
    for result in results:
        assert [row["depth"] for row in result.details["depths"]] == [0.0, 0.5, 1.0]
        assert result.to_json()["details"]["haystack"] == "noise"


def test_lengths_may_differ_by_suite_and_bins_follow_the_trained_length(under_test: ModelUnderTest) -> None:
    asked = settings(
        suites=("passkey", "perplexity"),
        lengths={"perplexity": [96], "passkey": [128]},
        samples=1,
        trained_length=32,
    )
    results = evaluate_model(under_test, asked, DOCUMENTS)
    assert [(result.suite, result.length) for result in results] == [("passkey", 128), ("perplexity", 96)]
    assert [each.end for each in results[1].positions] == [32, 40, 48, 56, 64, 80, 96]


def test_records_of_so_many_lines_have_lengths_of_their_own(tokenizer: Any) -> None:
    under_test = ModelUnderTest(tokenizer, Served())
    results = evaluate_model(under_test, settings(suites=("longeval",), lines=(5, 9)))
    assert [r.task for r in results] == ["lines_5", "lines_9"]
    assert results[0].length < results[1].length


def test_perplexity_without_text_is_not_run(under_test: ModelUnderTest) -> None:
    (result,) = evaluate_model(under_test, settings(suites=("perplexity",), lengths=(96,)))
    assert (result.status, result.reason, result.n) == ("not run", "no text was given", 0)
    assert math.isnan(result.score)


def test_what_a_server_cannot_do_is_not_run_with_the_reason(tokenizer: Any) -> None:
    served = ModelUnderTest(tokenizer, Served())
    asked = settings(
        suites=("perplexity", "needle", "short"),
        lengths=(200,),
        depths=1,
        tasks=("teacher_forced", "hellaswag"),
    )
    results = evaluate_model(served, asked, DOCUMENTS)
    assert [(r.task, r.status) for r in results] == [
        ("perplexity", "not run"),
        ("teacher_forced", "not run"),
        ("hellaswag", "not run"),
    ]
    assert all("measure the checkpoint itself" in (r.reason or "") for r in results)


def test_ruler_over_some_tasks_says_what_its_mean_is_of(tokenizer: Any) -> None:
    names = ("niah_single_1", "vt", "qa_1")
    results = evaluate_model(
        ModelUnderTest(tokenizer, Served()), settings(suites=("ruler",), tasks=names, lengths=(3000,))
    )
    by_task = {r.task: r for r in results}
    assert list(by_task) == [*names, "overall"]
    assert by_task["qa_1"].status == "not run"
    assert "SQuAD" in (by_task["qa_1"].reason or "")
    overall = by_task["overall"]
    assert overall.details["tasks"] == ["niah_single_1", "vt"]
    assert overall.score == pytest.approx((by_task["niah_single_1"].score + by_task["vt"].score) / 2)
    assert set(overall.details["left_out"]) == {*PUBLISHED, "qa_1"} - {"niah_single_1", "vt"}
    assert "without" in (overall.reason or "")


class Narrow(Served):
    """A server that rejects prompts above some length, which its own template makes longer than they seem."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context = context

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Any]:
        for index, request in enumerate(requests):
            fits = len(request.input_ids) + request.max_new_tokens <= self.context
            yield Answer(index, " 7", 1, True) if fits else Rejection(index, "too long")


def test_a_task_whose_prompts_are_all_rejected_is_not_run_and_the_others_are(
    tokenizer: Any, tmp_path: Path
) -> None:
    asked = settings(
        suites=("ruler", "passkey"), lengths=(2000, 2400), samples=2, tasks=("niah_single_1", "cwe")
    )
    log = PredictionLog(tmp_path / "p.jsonl")
    results = evaluate_model(ModelUnderTest(tokenizer, Narrow(2000)), asked, stores=Stores(log, result_log()))
    assert [(r.task, r.length, r.status) for r in results if r.task != "overall"] == [
        (task, length, "ok" if length == 2000 else "not run")
        for task in ("niah_single_1", "cwe", "passkey")
        for length in (2000, 2400)
    ]
    reasons = {r.reason for r in results if r.status != "ok" and r.task != "overall"}
    assert reasons == {"the server rejected all 2 prompts; reason for the first: too long"}
    # Rejected prompts are asked again, the others are not.
    wide = Narrow(2400)
    stores = Stores(PredictionLog(tmp_path / "p.jsonl"), result_log())
    again = evaluate_model(ModelUnderTest(tokenizer, wide), asked, stores=stores)
    assert all(r.status == "ok" for r in again)


def test_a_run_fails_if_every_prompt_is_rejected(tokenizer: Any) -> None:
    asked = settings(suites=("passkey",), lengths=(1000, 2000), samples=2)
    with pytest.raises(RunFailure, match="rejected all 4 prompts; reason for the first: too long"):
        evaluate_model(ModelUnderTest(tokenizer, Narrow(10)), asked)


def test_a_run_that_broke_goes_on_without_asking_twice(tokenizer: Any, tmp_path: Path) -> None:
    asked = settings(suites=("passkey",), lengths=(200, 300), samples=3)
    first, second, third = Served(most=4), Served(), Served()

    def run(served: Served) -> list[TaskResult]:
        log, results = (
            PredictionLog(tmp_path / "predictions.jsonl"),
            result_log(tmp_path / "finished.jsonl"),
        )
        stores = Stores(log, results, tmp_path / "samples")
        return evaluate_model(ModelUnderTest(tokenizer, served), asked, stores=stores)

    with pytest.raises(RunFailure):
        run(first)
    resumed = run(second)
    assert (first.asked, second.asked) == (4, 2)
    again = run(third)
    assert third.asked == 0
    whole = evaluate_model(ModelUnderTest(tokenizer, Served()), asked)
    assert [r.to_json() for r in resumed] == [r.to_json() for r in again] == [r.to_json() for r in whole]
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 6


def test_perplexity_is_not_measured_twice(under_test: ModelUnderTest, tmp_path: Path) -> None:
    asked = settings(suites=("perplexity",), lengths=(96,))
    told: list[Any] = []

    def run() -> Any:
        stores = Stores(PredictionLog(), result_log(tmp_path / "finished.jsonl"))
        return evaluate_model(under_test, asked, DOCUMENTS, stores, progress=lambda *call: told.append(call))

    (first,) = run()
    count = len(told)
    (second,) = run()
    assert count > 0
    assert len(told) == count
    assert first.to_json() == second.to_json()


def test_impossible_lengths_are_refused_before_anything_runs(under_test: ModelUnderTest) -> None:
    told: list[Any] = []
    for lengths, message in (
        ((96, 16), "do not fit in 16 tokens.*passkey needs"),
        ((96, 4096), "too few for one row"),
        ((), "needs lengths in tokens"),
    ):
        with pytest.raises(RopewalkError, match=message):
            evaluate_model(
                under_test, settings(lengths=lengths), DOCUMENTS, progress=lambda *call: told.append(call)
            )
    assert not told


def test_the_shortest_length_that_is_named_works(tokenizer: Any) -> None:
    under_test = ModelUnderTest(tokenizer, Served())
    asked = settings(suites=("ruler",), tasks=("niah_single_1", "vt"), exclude=(), samples=3)
    with pytest.raises(RopewalkError) as refused:
        evaluate_model(under_test, changed(asked, lengths=(200,)))
    needs = dict(
        part.split(" needs ") for part in str(refused.value).split(": ")[1].split(";")[0].split(", ")
    )
    assert set(needs) == {"niah_single_1", "vt"}
    assert "--exclude niah_single_1,vt" in str(refused.value)
    for name, tokens in needs.items():
        alone = changed(asked, tasks=(name,), lengths=(int(tokens),))
        assert evaluate_model(under_test, alone)[0].status == "ok"
        # Other lengths have other samples, which may need a token more.
        with pytest.raises(RopewalkError, match=f"{name} needs"):
            evaluate_model(under_test, changed(alone, lengths=(int(tokens) - 1,)))


def test_a_length_beyond_the_config_is_refused_unless_asked_for(under_test: ModelUnderTest) -> None:
    asked = Settings(suites=("passkey",), lengths=(96,), samples=1)
    with pytest.raises(
        RopewalkError, match=r"length is 96 tokens.*max_position_embeddings 64.*--beyond-config"
    ):
        evaluate_model(under_test, asked)


def test_unknown_names_are_told_with_the_nearest() -> None:
    under_test = ModelUnderTest(word_tokenizer(), Served())
    with pytest.raises(RopewalkError, match="unknown task 'niah_singel_1'; did you mean niah_single_1"):
        evaluate_model(under_test, settings(suites=("ruler",), lengths=(4096,), tasks=("niah_singel_1",)))
    with pytest.raises(RopewalkError, match="leaves no task to run"):
        evaluate_model(under_test, settings(suites=("passkey",), lengths=(4096,), exclude=("passkey",)))


class Thinker(Served):
    """Thinks about a wrong number first."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.requests = "<think>11111? No.</think> I do not know", list[GenerationRequest]()

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        self.requests = list(requests)
        for index in range(len(requests)):
            yield Answer(index, self.text, 20, True)


def test_thoughts_have_room_beside_the_answer_and_are_not_scored() -> None:
    tokenizer = core_cases.byte_tokenizer(chat=CHAT)
    found, backends = {}, {}
    for thinking in (0, 64):
        backends[thinking] = backend = Thinker()
        asked = settings(suites=("passkey",), lengths=(2048,), samples=2, chat=True, thinking_tokens=thinking)
        (result,) = evaluate_model(ModelUnderTest(tokenizer, backend), asked)
        found[thinking] = result
        for request in backend.requests:
            assert len(request.input_ids) + request.max_new_tokens <= request.length == 2048
    short, long = (backends[thinking].requests[0] for thinking in (0, 64))
    assert long.max_new_tokens == short.max_new_tokens + 64
    assert found[64].score == 0.0
    encoder = PromptEncoder(tokenizer, chat=True, thinking=9)
    (prediction,) = generated_predictions(Thinker(), encoder, [asked_sample(encoder)], PredictionLog())
    assert prediction.prediction == "<think>11111? No.</think> I do not know"
    assert prediction.answer == "I do not know"


def test_a_template_that_always_thinks_needs_tokens_for_it(under_test: ModelUnderTest) -> None:
    opened = core_cases.byte_tokenizer(chat=CHAT.replace("[assistant]", "[assistant]<think>\n"))
    asked = settings(suites=("passkey",), lengths=(2048,), samples=2, chat=True)
    backend = Thinker()
    with pytest.raises(
        RopewalkError, match=r"always starts the model's thoughts.*; add --thinking-tokens 4096"
    ):
        evaluate_model(ModelUnderTest(opened, backend), asked)
    assert backend.requests == []
    # Teacher forcing generates nothing.
    forced = settings(suites=("needle",), lengths=(2048,), tasks=("teacher_forced",), chat=True)
    check_evaluation(ModelUnderTest(opened, backend), forced)
    backend.text = "11111? No"
    (result,) = evaluate_model(ModelUnderTest(opened, backend), changed(asked, thinking_tokens=64))
    assert (result.score, result.details["empty"]) == (0, 2)
    assert "2 of 2 answers consist of the model's thoughts alone" in (result.reason or "")


def test_a_chat_server_that_thinks_by_default_needs_tokens_for_it() -> None:
    by_default = (
        CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    asked = settings(suites=("passkey",), lengths=(2048,), samples=2, chat=True)

    class ChatServer(Thinker):
        as_turns = True

    served = ModelUnderTest(core_cases.byte_tokenizer(chat=by_default), ChatServer())
    with pytest.raises(
        RopewalkError, match=r"template lets the model think.*add --thinking-tokens 4096, or turn"
    ):
        check_evaluation(served, asked)
    check_evaluation(served, changed(asked, thinking_tokens=64))
    served.backend.description = {"extra": {"chat_template_kwargs": {"enable_thinking": False}}}
    check_evaluation(served, asked)


def test_what_has_no_use_for_thoughts_or_a_system_prompt_is_named(under_test: ModelUnderTest) -> None:
    for change, option in (
        ({"thinking_tokens": 5}, "--thinking-tokens"),
        ({"system_prompt": "x"}, "--system-prompt"),
    ):
        for suites, what in ((("perplexity",), "perplexity"), (("needle",), "teacher_forced")):
            asked = settings(suites=suites, lengths=(512,), chat=True, **change)
            asked = changed(asked, tasks=("teacher_forced",)) if suites == ("needle",) else asked
            with pytest.raises(RopewalkError, match=f"{option} has no effect on {what}"):
                evaluate_model(under_test, asked)
