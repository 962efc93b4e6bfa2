"""Plans of published models, and recipes that are proposed for them."""

import json
from pathlib import Path
from typing import Any

from ropewalk.data.settings import SourceSpec
from ropewalk.dry_run.draft import Draft
from ropewalk.dry_run.facts import DocumentFacts, MachineFacts
from ropewalk.dry_run.settings import InitSettings
from ropewalk.planning import PlanSettings, plan
from ropewalk.planning.practice import practice_for
from ropewalk.planning.run import PlanResult
from tests.checkpoint_cases import path_of

LAPTOP = MachineFacts(8, 0, 0, 2**36)
TARGETS = {"llama-3.1-8b": 2**20, "llama-2-7b": 2**15, "qwen3-8b": 2**17}
PLANS = {
    name: plan(PlanSettings(model=str(path_of(name)), target=target)) for name, target in TARGETS.items()
}


def asked(planned: PlanResult, **changes: object) -> InitSettings:
    values = {
        "model": planned.config.model,
        "documents": ("books", "hf:a/b"),
        "target": planned.target_length,
    }
    return InitSettings(**{**values, **changes})


def recipe_of(
    settings: InitSettings,
    planned: PlanResult,
    documents: DocumentFacts | None,
    machine: MachineFacts,
    adapter: str | None,
    **changes: Any,
) -> str:
    """The text of a recipe for the documents of the settings."""
    sources = [SourceSpec(path=path) for path in settings.documents]
    practice = practice_for(8 * 10**9, adapter is not None)
    return Draft(settings, planned, machine, practice, documents, sources, adapter, **changes).text()


LONG = "def f(x):\n    return x + 1\n" * 300


def records(path: Path, *rows: dict[str, str]) -> str:
    """A file of records."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
