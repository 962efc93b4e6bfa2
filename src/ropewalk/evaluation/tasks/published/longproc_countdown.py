"""Countdown of LongProc: the published search for equations that reach a target, and the scores of answers.

Source: princeton-pli/LongProc at 78e873a, ``longproc/countdown_evaluator.py`` (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ropewalk.evaluation.samples import NO_DETAILS

EXAMPLES = (((40, 19, 23, 7), 29), ((9, 16, 6, 18), 12))
"""Numbers and targets of the two examples in prompts of countdown."""
TOO_LARGE = 2000
SEARCH = "# Search Procedure"
FOUND = "Now we have found the target"


def _searched(numbers: list[int], target: int, depth: int, log: list[str]) -> list[str] | None:
    """Append to the log what a depth-first search tries; return the equations to the target, None without any."""
    pairs = list(combinations(numbers, 2))
    start, last = f"umber set: {numbers}, target: {target}", len(numbers) == 2
    start += ", just two numbers left." if last else f". Options for choosing two numbers: {pairs}."
    log[-1] += f" Current n{start}" if depth else f"Initial n{start}"
    depth += not last
    for (i, a), (j, b) in combinations(enumerate(numbers), 2):
        left = [number for place, number in enumerate(numbers) if place not in (i, j)]
        if not last:
            log.append(
                f"{_bullet(depth)}Pick two numbers ({a}, {b}) (numbers left: {left}). Try possible operations."
            )
        high, low = max(a, b), min(a, b)
        quotient = high / low if low else None
        for sign, result in (("+", high + low), ("-", high - low), ("*", high * low), ("/", quotient)):
            tried = f"{high} {sign} {low}"
            whole = int(result) if result is not None and result % 1 == 0 else None
            shown = f"{result:.1f}" if whole is None and result is not None else str(whole)
            equation = f"{tried} (invalid operation)" if result is None else f"{tried} = {shown}"
            log.append(f"{_bullet(depth + 1)}Try {equation}. ")
            if result is None:
                log[-1] += "drop this branch."
            elif whole is None:
                log[-1] += f"{shown} is a decimal, drop this branch."
            elif whole >= TOO_LARGE:
                log[-1] += f"{whole} exceeds the maximum intermediate result, drop this branch."
            elif last and whole == target:
                log[-1] += f"Evaluate {whole} == {target}, target found!"
                return [equation]
            elif last:
                log[-1] += f"Evaluate {whole} != {target}, drop this branch."
            else:
                log[-1] += f"Add {whole} to the number set."
                if (rest := _searched([whole, *left], target, depth + 1, log)) is not None:
                    return [equation, *rest]
    return None


def _bullet(depth: int) -> str:
    return " " * depth + "|- "


def search_log(numbers: Sequence[int], target: int) -> str:
    """The right answer of countdown: the log of a depth-first search in the published form, and the solution.

    Raises:
        ValueError: if no equations reach the target.
    """
    log = [""]
    steps = _searched([*numbers], target, 0, log)
    if steps is None:
        raise ValueError(f"no equations of {[*numbers]} reach {target}")
    first, second, last = steps
    return (
        "\n".join([SEARCH, *log])
        + f"\n\n{FOUND}, let's trace back the solution:\nFinal step: {last}\nThe step before: {second}\n"
        f"The first step: {first}\n\nOutput the solution in the required format:\n"
        f"<Solution>\n{first}\n{second}\n{last}\n</Solution>\n"
    )


def tagged(answer: str, tag: str) -> str | None:
    """What stands between the first tag of this name and the first end of one; None without either."""
    start, end = answer.find(f"<{tag}>"), answer.find(f"</{tag}>")
    return None if min(start, end) < 0 else answer[start + len(tag) + 2 : end].strip()


def solved(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the three equations of the solution use each number once and reach the target, else 0 (countdown)."""
    numbers, lines = list(details["nums"]), (tagged(answer, "Solution") or "").split("\n")
    for line in lines:
        # The authors split at the first of the signs +, -, * and / that occurs: only sums may have a negative number.
        found = re.fullmatch(r"\s*(-?[0-9]+) *(\+) *(-?[0-9]+) *= *(-?[0-9]+)\s*", line) or re.fullmatch(
            r"\s*([0-9]+) *([-*/]) *([0-9]+) *= *(-?[0-9]+)\s*", line
        )
        if found is None or len(line) > 60:
            return 0.0
        a, b, result = (int(found[place]) for place in (1, 3, 4))
        # A quotient as a product, which has no rounding and no division by zero.
        right = {"+": a + b, "-": a - b, "*": a * b}.get(found[2], result)
        if right != result or (found[2] == "/" and (b == 0 or result * b != a)):
            return 0.0
        for number in (a, b):
            if number not in numbers:
                return 0.0
            numbers.remove(number)
        numbers.append(result)
    return float(len(lines) == 3 and numbers[:1] == [details["target"]])


def search(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """Share of the search before its first wrong step; 1 if the solution is right (countdown)."""
    if solved(answer, references, details):
        return 1.0
    if SEARCH not in answer:
        return 0.0
    said, right = (
        text.split(SEARCH)[-1].strip().split("\n") for text in (answer, references[0].partition(FOUND)[0])
    )
    if said[0] != right[0]:
        return 0.0
    steps = list(zip(said[1:], right[1:], strict=False))
    wrong = next((place for place, step in enumerate(steps) if not _same_step(*step)), len(steps) - 1)
    # One step less than were right, as published; without any, it would be less than nothing.
    return max(wrong, 0) / (len(right) - 1)


def _same_step(said: str, right: str) -> bool:
    if said == right or "Pick two numbers" in right:
        return said == right
    dropped = "drop this branch"
    return said.split("=")[0] == right.split("=")[0] and (dropped in said) == (dropped in right)
