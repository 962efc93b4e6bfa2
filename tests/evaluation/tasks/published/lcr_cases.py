"""A folder in the form of AA-LCR's."""

import csv
from pathlib import Path

FIELDS = (
    *("document_category", "document_set_id", "question_id", "question", "answer"),
    *("data_source_filenames", "data_source_urls", "input_tokens", "input_tokens_band"),
)
NAMED = "Q1 – ACME's report.txt"
"""A name as the table has it."""
STORED = "Q1 – ACME’s report.txt".encode().decode("cp437")
"""The same name as a program unpacks it that reads the archive's names as code page 437."""


def write_lcr(root: Path, names: str = f"{NAMED};b.txt", questions: int = 3) -> Path:
    documents = root / "lcr" / "Company Documents" / "set1"
    documents.mkdir(parents=True)
    (documents / STORED).write_text("ACME earned 12 dollars.")
    (documents / "b.txt").write_text("Nothing here.")
    with (root / "AA-LCR_Dataset.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for number in range(questions):
            row = dict.fromkeys(FIELDS, "") | {
                "document_category": "Company Documents",
                "document_set_id": "set1",
                "question": f"How much {number}?",
                "answer": "12 dollars",
                "data_source_filenames": names,
            }
            writer.writerow(row)
    return root
