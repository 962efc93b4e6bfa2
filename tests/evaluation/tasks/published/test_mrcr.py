"""Published MRCR chats: OpenAI's rows of turns and Google's texts, by their own scores."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from ropewalk.errors import RopewalkError
from tests.evaluation.tasks.published.published_cases import results_of, samples_of, task_of

PREFIX = "aB3dE6gH9j"
GOOGLE_PREFIX = "aB3dE6gH9jK2"


def turns(needles: int, others: int) -> list[dict[str, str]]:
    found = []
    for number in range(needles + others):
        what = "poem about tea" if number < needles else f"riddle about {number}"
        found += [
            {"role": "user", "content": f"write a {what}"},
            {"role": "assistant", "content": f"text {number} of many words"},
        ]
    question = f"Prepend {PREFIX} to the 2nd (1 indexed) poem about tea."
    return [*found, {"role": "user", "content": question}]


def openai_row(needles: int, others: int = 3) -> dict[str, Any]:
    return {
        "prompt": json.dumps(turns(needles, others)),
        "answer": PREFIX + "text 1 of many words",
        "random_string_to_prepend": PREFIX,
        "n_needles": needles,
        "desired_msg_index": 3,
        "total_messages": 2 * (needles + others) + 1,
        "n_chars": 100,
    }


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def test_openai_rows_are_chats(tmp_path: Path) -> None:
    path = parquet(tmp_path / "mrcr.parquet", [openai_row(2), openai_row(4), openai_row(2, 9)])
    first, second = samples_of("openai_mrcr", path, 2048, "openai_mrcr_2_up_to")
    assert [(role, text) for role, text in first.earlier] == [
        (turn["role"], turn["content"]) for turn in turns(2, 3)[:-1]
    ]
    assert first.text == turns(2, 3)[-1]["content"]
    assert (first.index, second.index) == (0, 2)
    assert first.references == (PREFIX + "text 1 of many words",)
    assert first.max_new_tokens == 256


@pytest.mark.parametrize(
    ("answer", "openai", "google", "prefix"),
    [
        (PREFIX + "text 1 of many words", 100, 100, 100),
        # A blank before it: nothing with OpenAI, all with Google.
        (" " + PREFIX + "text 1 of many words", 0, 100, 0),
        ("no idea", 0, 0, 0),
    ],
)
def test_openai_scores(tmp_path: Path, answer: str, openai: float, google: float, prefix: float) -> None:
    path = parquet(tmp_path / "mrcr.parquet", [openai_row(2)])
    found = results_of("openai_mrcr", path, 2048, lambda text: answer, ["openai_mrcr_2_up_to"])
    assert {task: result.score for task, result in found.items()} == {
        "openai_mrcr_2_up_to": openai,
        "openai_mrcr_2_up_to.google": google,
        "openai_mrcr_2_up_to.prefix": prefix,
    }


def google_file(folder: Path, name: str, answer: str) -> Path:
    path = folder / name
    # Line ends, quotes and a separator of lines that Python knows, in one value.
    queries = 'User: write a "poem"\n\nAssistant: one,\u2028two\r\n\nUser: Prepend it'
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["queries", "answer", "context_len"])
        writer.writeheader()
        writer.writerow({"queries": queries, "answer": answer, "context_len": 7})
    return path


def test_google_files_say_their_needles_and_are_one_turn(tmp_path: Path) -> None:
    name = "mrcr_v2p1_8needle_in_(4096,8192)_dynamic_fewshot_text_style_fast.csv"
    google_file(tmp_path, name, f"{GOOGLE_PREFIX} one, two\n")
    google_file(tmp_path, name.replace("8needle", "4needle"), f"{GOOGLE_PREFIX} other")
    (sample,) = samples_of("google_mrcr", tmp_path, 2048, "google_mrcr_8_up_to")
    assert sample.text == 'User: write a "poem"\n\nAssistant: one,\u2028two\r\n\nUser: Prepend it'
    assert (sample.earlier, sample.references) == ((), (f"{GOOGLE_PREFIX} one, two",))
    found = results_of(
        "google_mrcr",
        tmp_path,
        2048,
        lambda text: f"Here: {GOOGLE_PREFIX}\none, two",
        ["google_mrcr_8_up_to"],
    )
    assert found["google_mrcr_8_up_to"].score == 100
    # Twelve characters, not OpenAI's ten, are the random string.
    cut = results_of(
        "google_mrcr", tmp_path, 2048, lambda text: GOOGLE_PREFIX[:10] + "one, two", ["google_mrcr_8_up_to"]
    )
    assert cut["google_mrcr_8_up_to"].score == 0


def test_a_name_without_needles_and_an_answer_without_string_are_refused(tmp_path: Path) -> None:
    path = google_file(tmp_path, "mine.csv", f"{GOOGLE_PREFIX} one")
    with pytest.raises(RopewalkError, match=r"row 1 of .* is odd \(the name mine says no number of needles"):
        list(task_of("google_mrcr", path, "google_mrcr_8").questions())
    row = {**openai_row(2), "answer": "text"}
    with pytest.raises(RopewalkError, match=f"does not begin with '{PREFIX}'"):
        list(task_of("openai_mrcr", parquet(tmp_path / "a.parquet", [row]), "openai_mrcr_2").questions())


def test_a_length_without_a_prompt_is_not_run(tmp_path: Path) -> None:
    path = parquet(tmp_path / "mrcr.parquet", [openai_row(2)])
    found = results_of("openai_mrcr", path, 8192, lambda text: "", ["openai_mrcr_2"])
    assert (found["openai_mrcr_2"].status, found["openai_mrcr_2"].reason) == (
        "not run",
        "the file has no prompt of this length, counted with the model's tokenizer and its answer",
    )
