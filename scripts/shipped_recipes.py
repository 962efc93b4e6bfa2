"""Write docs/shipped-recipes.md: what each recipe that ropewalk ships is for.

python scripts/shipped_recipes.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from ropewalk.recipes import head_of, shipped_recipes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "shipped-recipes.md"
HEAD = """# Shipped recipes

Run a recipe by its name, and set your own model, documents and output folder:
`ropewalk extend NAME --set model=... --set 'data.sources=[...]' --set output=...`. The recipes `demo`, `longrope` and
`retrieval` also run without these settings, with a small model and texts that come with ropewalk.

To change more, save the output of `ropewalk recipe show NAME` as a file and edit it. `ropewalk recipe check` checks the
file and trains nothing. In each recipe, comments name the paper or model card that the settings come from ("Source"),
and say what the recipe does otherwise ("Changed"). [Recipes](recipes.md) explains the keys.

Each head says what `ropewalk plan` says of memory and time on a named machine, from the published config. These figures
are planned, not measured. The recipes that reproduce no paper also say what the publisher of the model offers without
training. A recipe for several sizes of a model names them, for `--set model=...`.
"""
FILES = "https://github.com/ropewalk/ropewalk/blob/main/src/ropewalk/recipes"


def page() -> str:
    """The whole page as Markdown, by model."""
    heads = {name: head_of(text) for name, text in shipped_recipes().items()}
    parts = []
    for model in sorted({head.model for head in heads.values()}, key=str.casefold):
        parts.append(f"\n## {model}\n\n")
        parts += [
            f"- [`{name}`]({FILES}/{name}.yaml), {head.goal}: {head.summary}.\n"
            for name, head in heads.items()
            if head.model == model
        ]
    return HEAD + "".join(parts)


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
