"""Writes repoqa_upstream.json: prompts and scores that the authors' program gives for the file of repoqa_cases.py.

    python tests/evaluation/tasks/published/repoqa_fixture.py CHECKOUT

CHECKOUT is one of evalplus/repoqa; none of it is part of ropewalk. It needs nltk, numpy, rich, tree_sitter<=0.21.3 and
tree_sitter_languages. In place of CodeLlama's, a tokenizer of one token a byte counts.
"""

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FIXTURE = Path(__file__).parent / "repoqa_upstream.json"
VERSION = "ae876deb1365dbf5a15b0533723c8ed123eee586"
SIZES = (400, 700, 1100, 1500, 2500, 10_000)


def main() -> None:
    sys.path[:0] = [sys.argv[1], str(Path(__file__).parents[4])]
    tokenizer = SimpleNamespace(tokenize=lambda text: list(text.encode()))
    for name in ("transformers", "tempdir", "wget", "appdirs"):
        sys.modules[name] = ModuleType(name)
    loaded = SimpleNamespace(from_pretrained=lambda name: tokenizer)
    sys.modules["transformers"].AutoTokenizer = sys.modules["transformers"].AutoConfig = loaded  # type: ignore[attr-defined]
    sys.modules["appdirs"].user_cache_dir = lambda name: name  # type: ignore[attr-defined]
    from repoqa import compute_score, search_needle_function, utility  # type: ignore[import-not-found]

    from tests.evaluation.tasks.published.repoqa_cases import answers, data

    prompts: list[Any] = []
    scores: list[Any] = []
    for language, repositories in data().items():
        for number, repo in enumerate(repositories):
            files = [(path, repo["content"][path]) for path in utility.topological_sort(repo["dependency"])]
            for place, needle in enumerate(repo["needles"]):
                for size in SIZES:
                    made = search_needle_function.make_code_context(
                        needle, files, (place + 0.5) / len(repo["needles"]), size, language
                    )
                    context = made["code_context"]
                    prompts.append(
                        [language, number, place, size, hashlib.sha256(context.encode()).hexdigest()]
                    )
            for answer, name in answers(repo, language):
                verdict, target, similarity = compute_score.needle_evaluator(
                    answer, name, repo, language, False
                )
                scores.append([language, number, answer, target, similarity, verdict.value == "best_match"])
    lines = [
        f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        for key, value in (("prompts", prompts), ("scores", scores))
    ]
    FIXTURE.write_text(f'{{\n"version": "{VERSION}",\n' + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
