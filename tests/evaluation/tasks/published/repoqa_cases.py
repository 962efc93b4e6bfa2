"""A small file of RepoQA's form: repositories of five languages, and answers about them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

FUNCTIONS = {
    "python": (
        "    def {name}(self, items):\n        # Of all {word}s, the {word} that comes first.\n"
        '        found = [each.{word} for each in items if each.{word} > {number}]\n        return found or "{word}"'
    ),
    "cpp": (
        "int {name}(const std::vector<int>& items) {{\n  /* the {word} */\n  int {word} = {number};\n"
        "  for (int each : items) {{ {word} += each * {number}; }}\n  return {word};\n}}"
    ),
    "java": (
        "    public int {name}(List<Integer> items) {{\n        // the {word}\n        int {word} = {number};\n"
        "        for (int each : items) {{ {word} += each * {number}; }}\n        return {word};\n    }}"
    ),
    "typescript": (
        "export function {name}(items: number[]): number {{\n  // the {word}\n  let {word} = {number};\n"
        "  items.forEach((each) => {{ {word} += each * {number}; }});\n  return {word};\n}}"
    ),
    "rust": (
        "pub fn {name}(items: &[i32]) -> i32 {{\n    // the {word}\n    let mut {word} = {number};\n"
        "    for each in items {{ {word} += each * {number}; }}\n    {word}\n}}"
    ),
}
AROUND = {
    "python": "class {word}:\n    size = {number}\n\n{functions}\n",
    "cpp": "#include <{word}.h>\nstatic int size_{word} = {number};\n\n{functions}\n",
    "java": "package {word};\n\npublic class C{number} {{\n{functions}\n}}\n",
    "typescript": "import {{ {word} }} from './{word}';\nconst size = {number};\n\n{functions}\n",
    "rust": "use crate::{word};\nconst SIZE: i32 = {number};\n\n{functions}\n",
}
WORDS = (
    *("anchor", "barrel", "candle", "dragon", "ember", "falcon"),
    *("garden", "harbor", "island", "jungle", "kettle", "lantern"),
)
FILES, EACH = 4, 3
"""Files of a repository, and functions of a file."""


def repository(language: str, seed: int) -> dict[str, Any]:
    """A repository whose files import each other, with two functions of each but the last described."""
    draw = random.Random(f"{language}/{seed}")
    content, needles, dependency = {}, [], {}
    for file in range(FILES):
        path = f"src/{draw.choice(WORDS)}_{file}.txt"
        names = [f"{draw.choice(WORDS)}_{file}{each}" for each in range(EACH)]
        functions = [
            FUNCTIONS[language].format(name=name, word=draw.choice(WORDS), number=draw.randrange(1000))
            for name in names
        ]
        around = AROUND[language].format(
            word=draw.choice(WORDS), number=draw.randrange(1000), functions="\n\n".join(functions)
        )
        content[path] = around
        for name, code in list(zip(names, functions, strict=True))[: 2 if file < FILES - 1 else 0]:
            start = around.index(code)
            first = around[:start].count("\n")
            needles.append(
                {
                    "name": name,
                    "path": path,
                    "description": f"\n1. **Purpose**: it is number {len(needles)} of {language} {seed}.\n",
                    "start_byte": start,
                    "end_byte": start + len(code),
                    "start_line": first,
                    "end_line": first + code.count("\n") + 1,
                }
            )
    paths = list(content)
    for path in paths:
        dependency[path] = [each for each in draw.sample(paths, 2) if each != path]
    draw.shuffle(needles)
    return {
        "repo": f"{draw.choice(WORDS)}/{language}{seed}",
        "content": content,
        "dependency": dependency,
        "needles": needles,
    }


def data(repositories: int = 2) -> dict[str, list[dict[str, Any]]]:
    """The value of the file."""
    return {language: [repository(language, seed) for seed in range(repositories)] for language in FUNCTIONS}


def code_of(repo: dict[str, Any], needle: dict[str, Any]) -> str:
    return str(repo["content"][needle["path"]][needle["start_byte"] : needle["end_byte"]])


def answers(repo: dict[str, Any], language: str) -> Iterator[tuple[str, str]]:
    """Answers about the first described function, with its name."""
    needle, other = repo["needles"][:2]
    name, code, wrong = needle["name"], code_of(repo, needle), code_of(repo, other)
    lines = code.split("\n")
    yield from (
        (each, name)
        for each in (
            f"```{language}\n{code}\n```",
            f"Here it is:\n\n```\n{code}\n```\nIt sums.",
            code,
            f"```{language}\n{wrong}\n```",
            f"```{language}\n{code}\n\n{wrong}\n```",
            f"```{language}\n{wrong}\n```\nNo, this one:\n```{language}\n{code}\n```",
            f"```text\nnone of the above\n```\n```{language}\n{code}\n```",
            f"```{language}\n" + "\n".join(lines[:2]) + "\n```",
            f"```{language}\n"
            + "\n".join([*lines[:-1], "  extra = one + two + three;", lines[-1]])
            + "\n```",
            f"```{language}\n{code.replace('each', 'item')}\n```",
            f"``` {language}\n{code}\n```",
            f"```{language}\n{code}",
            f"Before ```{language}\n{code}\n```",
            f"<think>```{language}\n{wrong}\n```</think>\n{code}",
            "```\n```",
            "",
            "I cannot find it.",
            f"```{language}\n{code}\n```\n<script>alert(1)</script>\x00",
            f"```{language}\n// ünïcödé ✓\n{code}\n```",
            f"```{language}\n{'(' * 200}\n```",
        )
    )
