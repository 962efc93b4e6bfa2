"""Writes longproc_upstream.json: what the authors' program asks and how it scores answers, for rows of our own.

    python -m tests.evaluation.tasks.published.longproc_fixture CHECKOUT

CHECKOUT is one of princeton-pli/LongProc, whose package runs (it needs pandas); none of it is part of ropewalk.
"""

import contextlib
import hashlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from ropewalk.evaluation.tasks.published.longproc_countdown import EXAMPLES
from tests.evaluation.tasks.published.longproc_cases import ANSWERS, ROWS

FIXTURE = Path(__file__).parent / "longproc_upstream.json"
VERSION = "78e873ae395e42625fba7942bbb92713de08b2a6"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    program = importlib.import_module("longproc.longproc_data")
    found: dict[str, Any] = {}
    for dataset, row in ROWS.items():
        if dataset == "countdown":
            _, right = program.build_countdown_demonstration([*row["nums"]], row["target"])
        else:
            right = row[{"path_traversal": "answer_nl", "tom_tracking": "solution"}.get(dataset, "gt")]
        example = {"reference_output": right, "item": {**row, "reference_output": right}}
        scores = []
        for answer in ANSWERS[dataset](right):
            with contextlib.redirect_stdout(io.StringIO()):
                score, _ = getattr(program, f"eval_{dataset}")(answer, example)
            scores.append(
                [float(score[name]) for name in ("accuracy", "partial_accuracy", "f1") if name in score]
            )
        found[dataset] = {"right_sha256": sha256(right), "scores": scores}
    # The two examples in the prompts of countdown, which the program searches for itself.
    examples = [sha256(program.build_countdown_demonstration([*n], t)[1]) for n, t in EXAMPLES]
    origin = {"source": "princeton-pli/LongProc", "version": VERSION, "license": "Apache-2.0"}
    FIXTURE.write_text(json.dumps({**origin, "examples_sha256": examples, "data": found}, indent=0) + "\n")


if __name__ == "__main__":
    main()
