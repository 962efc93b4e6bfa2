"""ropewalk as ropewalk-core installs it: python -m tests.core_program eval MODEL ..., without what ropewalk adds.

Stands for an environment of its own, which `make wheel` makes: imports of the other packages fail here.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ropewalk.versions import FULL

OTHERS = ("openai", "pandas", "scipy", "lm_eval", "nltk", "gguf", "ray", "inspect_ai")
"""What extras, or packages that ropewalk needs, bring beside those."""


class Missing(MetaPathFinder):
    """Finds first, and finds nothing, what ropewalk-core does not bring."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in (*FULL, *OTHERS):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def without_the_rest() -> None:
    """Let imports fail from now on."""
    assert not {*FULL, *OTHERS} & sys.modules.keys()
    sys.meta_path.insert(0, Missing())


if __name__ == "__main__":
    without_the_rest()
    from ropewalk.cli.app import run

    run()
