"""Writes ruler_qa_upstream.json: digests of the qa prompts that NVIDIA/RULER's own script makes of made-up data.

    python -m tests.evaluation.ruler_qa_fixture --upstream CLONE --python PYTHON

CLONE is a checkout of NVIDIA/RULER at c3f5e3b; PYTHON runs its scripts (see ruler_fixture.py).
"""

import argparse
import json
import tempfile
from pathlib import Path

FIXTURE = Path(__file__).parent / "ruler_qa_upstream.json"
COUNT = 4
CASES = (
    *(("qa_1", length) for length in (2048, 3072, 4096, 8960, 16384, 40960)),
    *(("qa_2", length) for length in (1024, 4096, 8192, 11008, 40960)),
)
"""Up to more than all documents take; at 3072, 8960 and 11008 they are just those of an article, or all there are."""


def main() -> None:
    from tests.evaluation.qa_cases import write
    from tests.evaluation.ruler_cases import template_tokenizer
    from tests.evaluation.ruler_fixture import digest, upstream

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--python", required=True)
    options = parser.parse_args()
    scripts = options.upstream / "scripts"
    write(scripts / "data/synthetic/json")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        template_tokenizer().save_pretrained(folder)
        for task, length in CASES:
            made = upstream(scripts, options.python, task, length, COUNT, Path(folder), timeout=40)
            found[f"{task} {length}"] = made and [
                {
                    "sha256": digest(f"{each['input']}{each['answer_prefix']}"),
                    "references": each["outputs"],
                    "length": each["length"],
                }
                for each in made
            ]
            print(task, length, "does not end" if made is None else [each["length"] for each in made])
    value = {"upstream": "NVIDIA/RULER c3f5e3b, seed 42", "samples": found}
    FIXTURE.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
