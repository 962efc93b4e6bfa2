"""Try a tiny random model of every causal family of transformers, with and without images, and write which work.

python scripts/supported_models.py [--check | --page | FAMILY ...]

Without arguments it tries all and writes src/ropewalk/models/families.json and docs/supported-models.md; with names,
these families are tried again; --page writes the page from the JSON, and --check compares the two.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "ropewalk" / "models" / "families.json"
PAGE = ROOT / "docs" / "supported-models.md"
BEGIN, END = "<!-- families: written by scripts/supported_models.py -->", "<!-- /families -->"


def tried(names: list[str]) -> dict[str, Any]:
    """The table, with some families tried again; with all, if none is named."""
    import torch
    import transformers

    from ropewalk.testing import Ranks
    from tests.models.every_family import families, has_rope, support_of

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found = json.loads(TABLE.read_text(encoding="utf-8"))["families"] if names else {}
    with Ranks(2) as ranks:
        for name in names or families():
            if has_rope(name):
                found[name] = support_of(name, ranks)
                words = (cell["status"] for cell in found[name].values())
                print(f"{name}: {', '.join(words)}", flush=True)
    return {
        "transformers": transformers.__version__,
        "without_rope": sorted(set(families()) - set(found)),
        "families": dict(sorted(found.items())),
    }


def page() -> str:
    """Which families train on packed sequences, which are refused, and which have no RoPE, as Markdown."""
    from ropewalk.models.support import ModelsSettings, _table, supported

    # The tests that tried models have read the table before it was written.
    _table.cache_clear()
    result = supported(ModelsSettings())
    packed: dict[str, list[str]] = {}
    for name, cells in result.families.items():
        packed.setdefault(cells["packed_training"].status, []).append(name)
    return "\n\n".join(
        [
            f"transformers {result.transformers}: {len(result.families)} families with RoPE.",
            *(f"- Packed training **{status}**: {', '.join(names)}." for status, names in packed.items()),
            f"- Without RoPE: {', '.join(result.without_rope)}.",
        ]
    )


def main() -> int:
    arguments = sys.argv[1:]
    if not {"--check", "--page"} & set(arguments):
        sys.path.insert(0, str(ROOT))
        TABLE.write_text(json.dumps(tried(arguments), indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    wanted = f"{before}{BEGIN}\n\n{page()}\n\n{END}{rest.split(END)[1]}"
    if "--check" in arguments:
        return 0 if wanted == text else 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
