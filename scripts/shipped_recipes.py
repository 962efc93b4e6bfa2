"""Write docs/shipped-recipes.md: every recipe that ropewalk ships, with its comments.

python scripts/shipped_recipes.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from ropewalk.recipes import shipped_recipes
from ropewalk.reporting.recipes import summary_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "shipped-recipes.md"
HEAD = """# Shipped recipes

Each recipe below runs by its name, with your own model, documents and output folder:
`ropewalk extend NAME --set model=... --set 'data.sources=[...]' --set output=...`. `ropewalk recipe show NAME` prints
one to a file for larger changes, and `ropewalk recipe check` checks it without a run. The comments say where the
numbers come from and what was changed; [recipes](recipes.md) explains the keys.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for name, text in shipped_recipes().items():
        parts.append(f"## {name}\n\n{summary_of(text)}.\n\n```yaml\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
