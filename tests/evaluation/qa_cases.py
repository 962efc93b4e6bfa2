"""SQuAD and HotpotQA in small: files of the same form, their texts made up."""

import json
import random
from pathlib import Path
from typing import Any

from tests.evaluation.ruler_cases import prose


def squad(articles: int = 8, seed: int = 0) -> dict[str, Any]:
    """As ``dev-v2.0.json``: paragraphs of very different sizes, questions that cannot be answered among them."""
    draw = random.Random(f"squad {seed}")
    data = []
    for article in range(articles):
        paragraphs = []
        for paragraph in range(draw.randint(3, 9)):
            number = 100 * article + paragraph
            context = prose(draw.choice((12, 25, 40, 60, 90)), seed=number)
            words = context.split(" ")
            qas = []
            for at in range(2):
                answers = [
                    {"text": word, "answer_start": context.index(word)}
                    for word in draw.sample(words, draw.randint(1, 3))
                ]
                impossible = draw.random() < 0.3
                qas.append(
                    {
                        "question": f"What is said {at} of {number} {{in}} braces?",
                        "id": f"{number}-{at}",
                        "answers": [] if impossible else answers,
                        "is_impossible": impossible,
                    }
                )
            paragraphs.append({"context": context, "qas": qas})
        # The real file repeats a few paragraphs too.
        if article % 3 == 0:
            paragraphs.append({"context": paragraphs[0]["context"], "qas": []})
        data.append({"title": f"Article_{article}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": data}


def hotpotqa(questions: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """As ``hotpot_dev_distractor_v1.json``: ten paragraphs a question, a few of them of other questions as well."""
    draw = random.Random(f"hotpotqa {seed}")
    paragraphs: list[list[Any]] = []
    found = []
    for number in range(questions):
        own = draw.sample(paragraphs, min(len(paragraphs), 3))
        while len(own) < 10:
            title = f"Title {len(paragraphs)}"
            text = prose(draw.choice((8, 15, 30, 45)), seed=10_000 + len(paragraphs))
            own.append([title, [text[: len(text) // 2], text[len(text) // 2 :]]])
            paragraphs.append(own[-1])
        draw.shuffle(own)
        found.append(
            {
                "_id": f"q{number}",
                "question": f"Which of both was {number}?",
                "answer": draw.choice(["yes", "no", own[0][0]]),
                "supporting_facts": [[own[0][0], 0], [own[1][0], 0]],
                "context": own,
                "type": "comparison",
                "level": "hard",
            }
        )
    return found


def write(folder: Path) -> tuple[str, str]:
    """Both files in a folder."""
    paths = folder / "squad.json", folder / "hotpotqa.json"
    for path, value in zip(paths, (squad(), hotpotqa()), strict=True):
        path.write_text(json.dumps(value), encoding="utf-8")
    return str(paths[0]), str(paths[1])
