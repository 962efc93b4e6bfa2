"""``ropewalk eval verify``: can a published result be reproduced from its files?

The scores are computed again from the stored answers, and the prompts are made again from the seed and the tokenizer.
The model itself is not run: whether it would give the same answers is not checked, only whether it is the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.predictions import Prediction, read_predictions
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.record import PREDICTIONS, read_record, rescore
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.samples import Sample, prompt_digest
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.suite_loop import generated_tasks
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.io.results import Result
from ropewalk.versions import software_versions

Status = Literal["reproduced", "differs", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One part of a result.

    Attributes:
        what: the part: ``scores``, ``prompts``, ``tokenizer``, ``model`` or ``versions``.
        status: ``differs`` if the files contradict the result.
        said: one sentence.
    """

    what: str
    status: Status
    said: str


@dataclass(frozen=True)
class Reproduction(Result):
    """What of a result follows from its files.

    Attributes:
        folder: folder of the evaluation.
        model: the model as the record names it.
        findings: one for each part.
    """

    folder: Path
    model: str
    findings: tuple[Finding, ...]

    @property
    def contradicted(self) -> bool:
        """Whether a part differs from what its files give."""
        return any(each.status == "differs" for each in self.findings)


def verify_result(folder: Path, tokenizer: str | None = None) -> Reproduction:
    """Compute again what the files of a finished evaluation determine, and compare.

    Args:
        folder: folder of the evaluation; nothing in it is changed.
        tokenizer: folder or Hub id of the tokenizer; None for the model that the record names.

    Raises:
        RopewalkError: if there is no finished evaluation in the folder, or the tokenizer cannot be read.
    """
    record, results = read_record(folder)
    stored = read_predictions(folder / PREDICTIONS) if (folder / PREDICTIONS).is_file() else []
    findings = [_scores(folder, results, bool(stored))]
    encoder, found = _encoder(record, tokenizer)
    findings += [found, _prompts(record, stored, encoder), _model(record), _versions(record)]
    return Reproduction(folder, str(record["model"]), tuple(findings))


def _scores(folder: Path, results: Sequence[TaskResult], stored: bool) -> Finding:
    ran = [each for each in results if each.status == "ok"]
    if not stored:
        return Finding(
            "scores", "not checked", "there are no stored answers, so no score can be computed again"
        )
    try:
        again = {(r.suite, r.task, r.length): r for r in rescore(folder).results}
    except RopewalkError as error:
        return Finding("scores", "differs", str(error))
    # Losses of texts are stored as such; what has no answers was not computed again.
    answered = [each for each in ran if each.unit == "percent"]
    for each in answered:
        other = again.get((each.suite, each.task, each.length))
        if other is None:
            said = f"{each.suite} {each.task} at {each.length} tokens does not follow from the stored answers"
            return Finding("scores", "differs", said)
        if (other.n, *_plain(other)) != (each.n, *_plain(each)):
            return Finding(
                "scores",
                "differs",
                f"{each.suite} {each.task} at {each.length} tokens is stated as {each.score:g} % of {each.n} samples, "
                f"but the stored answers give {other.score:g} % of {other.n}",
            )
    left = len(ran) - len(answered)
    return Finding(
        "scores",
        "reproduced",
        f"{len(answered)} scores follow from the stored answers"
        + (f"; {left} others, such as perplexities, have no answers" if left else ""),
    )


def _plain(result: TaskResult) -> tuple[float, ...]:
    # A JSON file keeps every digit of a number, and NaN differs from itself.
    return tuple(-1.0 if math.isnan(each) else each for each in (result.score, *result.ci95))


def _encoder(record: Mapping[str, Any], tokenizer: str | None) -> tuple[PromptEncoder | None, Finding]:
    """The encoder of the prompts if the tokenizer is at hand and is the one of the record."""
    from ropewalk.data import load_tokenizer
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.data.tokens.tokenise import tokenizer_identity

    stated = record.get("tokenizer_sha256")
    if stated is None:
        return None, Finding(
            "tokenizer", "not checked", "a server counted the tokens, and the record has no digest"
        )
    try:
        found = load_tokenizer(resolve_model(tokenizer or str(record["model"])))
    except RopewalkError as error:
        if tokenizer is not None:
            raise
        return None, Finding("tokenizer", "not checked", f"{error}; name it with --tokenizer")
    if tokenizer_identity(found)["sha256"] != stated:
        return None, Finding(
            "tokenizer", "differs", f"{tokenizer or record['model']} has another tokenizer now"
        )
    said = "the tokenizer is that of the record"
    return encoder_of_record(record, found), Finding("tokenizer", "reproduced", said)


def _prompts(
    record: Mapping[str, Any], stored: Sequence[Prediction], encoder: PromptEncoder | None
) -> Finding:
    if not stored or encoder is None:
        why = "there are no stored answers" if not stored else "they need the tokenizer"
        return Finding("prompts", "not checked", f"the prompts were not made again, because {why}")
    try:
        settings = settings_of(record)
        different = list(_other_prompts(settings, stored, encoder))
    except (RopewalkError, ValueError) as error:
        return Finding("prompts", "not checked", f"the prompts cannot be made again: {error}")
    if different:
        return Finding(
            "prompts",
            "differs",
            f"{len(different)} of {len(stored)} prompts differ: {different[0]} is the first",
        )
    return Finding("prompts", "reproduced", f"{len(stored)} prompts follow from the seed and the tokenizer")


def _other_prompts(settings: Settings, stored: Sequence[Prediction], encoder: PromptEncoder) -> Iterator[str]:
    """The samples whose prompt is another one when it is made again."""
    groups: dict[tuple[str, str, int], list[Prediction]] = {}
    for each in stored:
        groups.setdefault((each.suite, each.task, each.length), []).append(each)
    for (name, task, length), answers in groups.items():
        made = samples_again(settings, encoder, name, task, length)
        digests = {sample.index: prompt_digest(sample) for sample in made}
        for each in answers:
            if digests.get(each.index) != each.prompt_sha256:
                yield f"sample {each.index} of {task} at {length} tokens"


def settings_of(record: Mapping[str, Any]) -> Settings:
    """Settings of an evaluation from its record.

    Raises:
        ValueError: for settings that this version does not know.
    """
    # A record has the numbers that were used: by suite where they are the defaults, which differ.
    counted = isinstance(record["settings"].get("samples"), int)
    own = {key: value for key, value in record["settings"].items() if counted or key != "samples"}
    return Settings.model_validate(own)


def encoder_of_record(record: Mapping[str, Any], tokenizer: Any) -> PromptEncoder:
    """Encoder of an evaluation's prompts from its record, with its tokenizer."""
    settings, backend = record["settings"], record.get("backend", {})
    as_turns = backend.get("prompts") == "turns"
    return PromptEncoder(
        tokenizer,
        bool(settings.get("chat")),
        settings.get("system_prompt"),
        int(settings.get("thinking_tokens") or 0),
        as_turns,
        as_turns and "chat_template_kwargs" in backend.get("extra", {}),
    )


def samples_again(
    settings: Settings, encoder: PromptEncoder, suite: str, task: str, length: int
) -> Iterator[Sample]:
    """The samples of a task and length, made from the seed.

    Raises:
        RopewalkError: if this version has no such task, or its data are missing.
    """
    known = BY_NAME.get(suite)
    if not isinstance(known, GeneratedSuite) or task not in known.known(settings):
        raise RopewalkError(f"{suite} has no task {task} in this version of ropewalk")
    made = generated_tasks(known, [task], settings)[task]
    if (reason := made.unavailable()) is not None:
        raise RopewalkError(f"{suite} {task}: {reason}")
    return made.samples(encoder, length - encoder.thinking, known.samples_of(settings), settings.seed)


def _model(record: Mapping[str, Any]) -> Finding:
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.checkpoint.digest import model_digest

    stated, name = record.get("model_sha256"), str(record["model"])
    if stated is None:
        return Finding("model", "not checked", f"{name} ran on a server, and its weights are not known")
    here = model_digest(resolve_model(name))
    if here is None:
        return Finding("model", "not checked", f"the weights of {name} are not on this machine")
    same = here == stated
    return Finding(
        "model",
        "reproduced" if same else "differs",
        f"the weights of {name} are "
        + ("those of the record" if same else "others than those of the record"),
    )


def _versions(record: Mapping[str, Any]) -> Finding:
    then, now = record.get("versions", {}), software_versions()
    other = [f"{name} {then[name]} (here {now.get(name)})" for name in then if now.get(name) != then[name]]
    if other:
        return Finding("versions", "not checked", f"the result was made with {', '.join(other)}")
    return Finding("versions", "reproduced", "the result was made with the versions that are installed")
