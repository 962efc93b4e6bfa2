"""Rows of LongProc's form, prompts in short, and answers to them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.evaluation.tasks.published.published_cases import write_rows

ROUTE = "From A, take a bus to B.\nFrom B, take a train to C.\nFrom C, take a ferry to D."
STEPS = (
    "Leon's belief on the cup:\n"
    "- Step 0: (initial state) {Leon location: attic; Leon's belief on cup: None}\n"
    "- Step 1: (Leon location changed) {Leon location: hall; Leon's belief on cup: hall's shelf}\n"
    "- Step 2: (Leon location unchanged) {Leon location: hall; Leon's belief on cup: hall's shelf}\n"
    "Final Answer: the hall's shelf"
)
TABLE = "name\tprice\nThe Cup\t$ 1.50\nA Plate\tN/A\nBowl\t3\n"
ROWS: dict[str, dict[str, Any]] = {
    "countdown": {"nums": [4, 8, 1, 3], "target": 13},
    "path_traversal": {"context_nl": "Roads {x}.", "question_repr": ["A", "D"], "answer_nl": ROUTE},
    "tom_tracking": {"story": "Step 0: Leon {x}.", "question": "Where?", "solution": STEPS},
    "html_to_tsv": {
        **{"html_path": "webpage/W1.html", "task_topic": "cups", "task_description": "(1) name; (2) price"},
        **{"filtering_instruction": "", "tsv_header": "name\tprice", "gt": TABLE},
    },
}
PROMPTS = {
    "countdown": "  {demonstration}\n  Numbers: {nums}\n  Target: {target}",
    "path_traversal": "  {city_context}\n  From {src_city} to {dst_city}.",
    "tom_tracking": "  Say {{so}}.\n  {story}\n  {question}",
    "html_to_tsv": "  {html_str}\n  {task_topic}: {task_description}{filtering_instruction}\n  {tsv_header}",
}


def folder(path: Path) -> Path:
    for dataset, row in ROWS.items():
        inside = path / dataset
        inside.mkdir(parents=True)
        write_rows(inside / f"{dataset}_0.5k.json", [row])
        (inside / "prompts.yaml").write_text(f"USER_PROMPT: |-\n{PROMPTS[dataset]}")
    (path / "html_to_tsv/webpage").mkdir()
    (path / "html_to_tsv/webpage/W1.html").write_text("<p>{cup}</p>\r\n")
    return path


def _solutions(right: str) -> list[str]:
    lines = right.split("\n")
    equations = [
        *(
            "4 + 8 = 12\n12 + 1 = 13\n13 + 3 = 16",
            "8 + 4 = 12\n12 * 1 = 12\n12 + 3 = 15",
            "8 + 4 = 12\n4 - 3 = 1",
        ),
        *(
            "1 - 3 = -2\n-2 + 8 = 6\n6 + 4 = 10",
            "8 / 4 = 2\n2 * 3 = 6\n6 + 1 = 7",
            "8 / 3 = 2\n4 + 1 = 5\n5 + 2 = 7",
        ),
        *(
            "4 + 8 + 1 = 13\n13 + 3 = 16\n1 + 1 = 2",
            "12 = 4 + 8\n1 + 1 = 2\n1 + 1 = 2",
            "4 * 3 = 12\n12 + 1 = 13",
        ),
        *(
            "8 * 1 = 8\n8 + 4 = 12\n4 + 3 = 7",
            "4 * 3 = 12\n8 - 1 = 7\n12 + 7 = 19",
            "4 - -8 = 12\n1 + 1 = 2\n2 + 2 = 4",
        ),
        *(
            "4 * 3 = 12\n12 + 1 = 13\n13 * 8 = 104",
            "4 + 8 = 12.0\n1 + 1 = 2\n2 + 2 = 4",
            "4 + 8 = 13\n1 + 3 = 4\n",
        ),
    ]
    return [
        right,
        *(f"<Solution>\n{each}\n</Solution>" for each in equations),
        *(
            "",
            "# Search Procedure",
            right.partition("<Solution>")[0],
            "\n".join(lines[:2]),
            "\n".join(lines[:5]),
        ),
        right.replace("<Solution>", "").replace("drop this", "keep this", 3),
        right.replace("<Solution>", "").replace("Pick two numbers", "Choose two numbers", 1),
        right.replace("<Solution>", "").replace("Evaluate", "Compare"),
        right.replace("<Solution>", "").replace("Options", "Choices", 1),
        right.replace("<Solution>", "").replace("3", "5", 40),
    ]


def _routes(right: str) -> list[str]:
    lines = right.split("\n")
    texts = [
        *(
            right,
            lines[0],
            "\n".join(lines[:2]),
            f"{right}\nFrom D, take a bus to E.",
            right.replace("train", "bus"),
        ),
        *(
            right.replace("A", "X"),
            right.replace("D", "X"),
            "",
            right.upper(),
            "\n".join(f" {each}" for each in lines),
        ),
    ]
    return [
        *(f"The route: <Route>\n{text}\n</Route> Done." for text in texts),
        right,
        f"<Route>{right}",
        "</Route> <Route>",
    ]


def _steps(right: str) -> list[str]:
    lines = right.split("\n")
    return [
        *(
            right,
            right.upper(),
            right.replace("- ", "* "),
            right.replace("- ", "  - "),
            f"  {right[26:]}",
            "",
        ),
        *(
            "\n".join(lines[:3]),
            f"{right}\n- more",
            right.replace("unchanged", "changed"),
            right.replace("'", "’"),
        ),
        *(
            right.replace("attic", "cellar"),
            right.replace("hall", "porch", 2),
            right.replace("location", "is in the"),
        ),
        *(
            right.replace("Final Answer: the", "Final Answer:"),
            right.replace("- ", "-"),
            "- nothing",
            lines[2],
        ),
    ]


def _tables(right: str) -> list[str]:
    lines = right.strip().split("\n")
    return [
        *(
            right,
            f"```tsv\n{right}```",
            f"Here:\n```tsv\n{right}",
            f"```tsv\n{right}```\n```",
            f"{right}That is all.",
            "",
        ),
        *(
            "\n".join([lines[0], *lines[:0:-1]]),
            "\n".join(lines[:3]),
            "\n".join(lines[1:]),
            right.upper(),
            "name\tprice",
        ),
        *(
            right.replace("\t", "  "),
            right.replace("Bowl\t3", "Bowl"),
            right.replace("A Plate\tN/A", "Plate\tna\tmore"),
        ),
        *(
            right.replace("name", "price"),
            right.replace("The Cup", '"The Cup"'),
            right.replace("Bowl", '"Bowl'),
        ),
        *(
            f"{lines[0]}\nno\n",
            right.replace("\nA Plate", "\n\nA Plate"),
            right.replace("\n", "\tx\n"),
            f"{right}Bowl\t3\n",
        ),
        *(right.replace("A Plate\tN/A", "x"), f"{right}Jar\t9\n", "x\ty\nCup\t150\nPlate\tna\nBowl\t3"),
    ]


ANSWERS: dict[str, Callable[[str], list[str]]] = {
    "countdown": _solutions,
    "path_traversal": _routes,
    "tom_tracking": _steps,
    "html_to_tsv": _tables,
}
"""Answers to a row, made from the right one."""
