"""``ropewalk eval judge``: a model on a server reads stored answers, and its verdicts become their scores.

A suite whose answers only a reader can judge has a :class:`~ropewalk.evaluation.tasks.suite.Judge`, which writes the
prompt and reads the verdict. Verdicts are logged as they arrive, so that an interrupted run resumes. If several judges
have read the answers, the result says how often they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.agreement import judge_of
from ropewalk.evaluation.backends.protocol import END_OF_THOUGHTS, GenerationRequest, Rejection
from ropewalk.evaluation.backends.server import ServerBackend
from ropewalk.evaluation.backends.serving import Serving
from ropewalk.evaluation.predictions import Prediction, read_predictions, write_predictions
from ropewalk.evaluation.record import (
    PREDICTIONS,
    EvaluationResult,
    held_evaluation,
    read_record,
    rescore_folder,
)
from ropewalk.evaluation.settings import JudgeSettings
from ropewalk.evaluation.tasks.suite import JUDGED_BY, VERDICTS, Judge
from ropewalk.io.digests import digest
from ropewalk.runs import Lines, Log

JUDGEMENTS = "judgements.jsonl"
VERDICT_TOKENS = 1024
"""Maximum tokens of a judge's answer, which may begin with thoughts."""


@dataclass(frozen=True)
class Judgement:
    """A judge's verdict on an answer.

    Attributes:
        judge: name of the judge's model.
        suite, task, length, index: the sample.
        prompt_sha256: digest of what the judge read, so that a verdict on another answer is not taken for this one.
        said: the judge's answer.
        address: the judge's server.
    """

    judge: str
    suite: str
    task: str
    length: int
    index: int
    prompt_sha256: str
    said: str
    address: str


_JUDGEMENTS = Lines[tuple[str, str], Judgement](
    key=lambda each: (each.judge, each.prompt_sha256),
    write=lambda each: dict(each.__dict__),
    read=lambda value: Judgement(**value),
    repeated=lambda old, new: None,
)


def judge_folder(
    settings: JudgeSettings,
    present: Callable[[EvaluationResult], None] = lambda found: None,
    report: Callable[[str], None] = lambda text: None,
) -> EvaluationResult:
    """Have the answers of an evaluation judged, and write its answers and results with the verdicts.

    Args:
        settings: the folder, and the server of the judge.
        present: called with the result before ``results.json`` is written, for example to draw figures.
        report: called with a sentence on what takes long.

    Raises:
        RopewalkError: if no answer needs a judge, or the server cannot be used.
        RunFailure: if the server stops answering or rejects a prompt; the verdicts so far are kept.
    """
    folder = settings.folder
    # First, because it says best what is missing.
    read_record(folder)
    with held_evaluation(folder):
        stored = read_predictions(folder / PREDICTIONS)
        waiting = [each for each in stored if judge_of(each.suite) is not None]
        if not waiting:
            raise RopewalkError(
                f"no answer in {folder} needs a judge; their scores follow from the answers alone"
            )
        # Turns need no tokenizer: the server counts.
        backend = ServerBackend(
            Serving(
                url=settings.url,
                model=settings.model,
                concurrency=settings.concurrency,
                endpoint="chat",
                extra=settings.extra,
            ),
            report=report,
        )
        name = backend.check()
        log = Log(folder / JUDGEMENTS, _JUDGEMENTS)
        _ask(backend, name, waiting, log, report)
        judged = {each.key: _judged(each, name, log) for each in waiting}
        write_predictions(folder / PREDICTIONS, [judged.get(each.key, each) for each in stored])
    return rescore_folder(folder, present)


def _prompt(prediction: Prediction) -> str:
    judge = judge_of(prediction.suite)
    assert judge is not None
    return judge.prompt(prediction.answer, prediction.references, prediction.details)


def _ask(
    backend: ServerBackend,
    name: str,
    waiting: Sequence[Prediction],
    log: Log[tuple[str, str], Judgement],
    report: Callable[[str], None],
) -> None:
    """Ask for the verdicts that the log does not have yet."""
    # An empty answer needs no reader.
    asked = [
        each for each in waiting if each.answer.strip() and (name, digest(_prompt(each))) not in log.known
    ]
    report(f"{name} judges {len(asked)} of {len(waiting)} answers")
    requests = []
    for each in asked:
        prompt = _prompt(each)
        # No token has less than a byte, so this is an upper bound of the tokens that the server may count.
        upper = len(prompt.encode())
        requests.append(
            GenerationRequest(
                (0,) * upper, VERDICT_TOKENS, upper + VERDICT_TOKENS, (("user", prompt),), text=prompt
            )
        )
    refused: list[Rejection] = []
    for given in backend.answers(requests):
        if isinstance(given, Rejection):
            refused.append(given)
            continue
        each = asked[given.index]
        log.add(Judgement(name, *each.key, digest(_prompt(each)), given.text, backend.address))
    if refused:
        raise RunFailure(
            f"{name} rejected {len(refused)} of {len(asked)} answers ({refused[0].reason}); the other verdicts are kept"
        )


def _judged(prediction: Prediction, name: str, log: Log[tuple[str, str], Judgement]) -> Prediction:
    """The prediction with all verdicts on it, and the score of this judge."""
    judge = judge_of(prediction.suite)
    assert judge is not None
    sha256 = digest(_prompt(prediction))
    judges = dict.fromkeys([*(each for each, of in log.known if of == sha256), name])
    verdicts = {}
    for each in judges:
        said = log.known.get((each, sha256))
        # Without a judgement, the answer was empty.
        verdicts[each] = 0.0 if said is None else _verdict(judge, said.said)
    details = {**prediction.details, VERDICTS: verdicts, JUDGED_BY: name}
    return replace(prediction, details=details).scored_again()


def _verdict(judge: Judge, said: str) -> float | None:
    return judge.verdict(said.rpartition(END_OF_THOUGHTS)[2].strip())
