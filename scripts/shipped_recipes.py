"""Write docs/shipped-recipes.md: what each recipe that ropewalk ships is for.

python scripts/shipped_recipes.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from ropewalk.recipes import shipped_recipes
from ropewalk.reporting.recipes import summary_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "shipped-recipes.md"
HEAD = """# Shipped recipes

Run a recipe by its name, and set your own model, documents and output folder:
`ropewalk extend NAME --set model=... --set 'data.sources=[...]' --set output=...`. The recipes `demo`, `longrope` and
`retrieval` also run without these settings, with a small model and texts that come with ropewalk.

To change more, save the output of `ropewalk recipe show NAME` as a file and edit it. `ropewalk recipe check` checks the
file and trains nothing. In each recipe, comments name the paper or model card that the settings come from ("Source"),
and say what the recipe does otherwise ("Changed"). [Recipes](recipes.md) explains the keys.

"""
FILES = "https://github.com/ropewalk/ropewalk/blob/main/src/ropewalk/recipes"


def page() -> str:
    """The whole page as Markdown."""
    recipes = shipped_recipes().items()
    return HEAD + "".join(
        f"- [`{name}`]({FILES}/{name}.yaml): {summary_of(text)}.\n" for name, text in recipes
    )


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
