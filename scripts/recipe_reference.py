"""Write the tables of recipe keys and of published runs into docs/recipes.md, and the JSON Schema of recipes.

python scripts/recipe_reference.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.data.settings import InterleaveSettings, SourceSpec
from ropewalk.evaluation.settings import OWN
from ropewalk.io.lengths import format_length
from ropewalk.io.settings import Option, Settings, choices_in, free_mark
from ropewalk.planning.practice import published_runs
from ropewalk.recipes import SCHEMA
from ropewalk.training.recipe import recipe
from ropewalk.training.recipe.evaluation import During
from ropewalk.training.recipe.schema import recipe_schema
from ropewalk.training.recipe.softmax_scale import SoftmaxScale

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
SCHEMA_FILE = ROOT / "src" / "ropewalk" / "recipes" / SCHEMA
BEGIN, END = "<!-- keys: written by scripts/recipe_reference.py -->", "<!-- /keys -->"
RUNS, END_OF_RUNS = "<!-- runs: written by scripts/recipe_reference.py -->", "<!-- /runs -->"
TABLES: tuple[tuple[str, str, type[Settings]], ...] = (
    ("The run", "", recipe.Recipe),
    ("Data", "data.", recipe.Data),
    ("A source (write only its path if it needs no other key)", "data.sources[].", SourceSpec),
    ("Mixture", "data.mixture.", MixtureSettings),
    ("Interleaved chunks", "data.interleave.", InterleaveSettings),
    ("A stage", "stages[].", recipe.Stage),
    ("Data of a stage", "stages[].data.", recipe.StageData),
    ("Optimizer of a stage", "stages[].optimizer.", recipe.StageOptimizer),
    ("RoPE of a stage", "stages[].rope.", recipe.Rope),
    ("Search for a stage's long factors", "stages[].rope.search.", recipe.Search),
    ("Softmax scale of a model without RoPE", "stages[].rope.softmax_scale.", SoftmaxScale),
    ("Search for the short factors", "short_context.", recipe.ShortContext),
    ("Adapter", "adapter.", recipe.AdapterSettings),
    ("Optimizer", "optimizer.", recipe.Optimizer),
    ("Checkpoints", "checkpoints.", recipe.Checkpoints),
    ("Which weights are exported", "export.", recipe.Export),
    ("Parallel processes", "parallel.", recipe.Parallel),
    ("Evaluation", "evaluation.", recipe.Evaluation),
    ("Evaluation during training", "evaluation.during.", During),
    *((f"Evaluation: {name}", f"evaluation.{name}.", model) for name, model in OWN.items()),
)


def default(field: Any) -> str:
    """A field's default as one writes it in YAML."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return ""
    return f"`{yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}`"


def meaning(model: type[Settings], field: Any) -> str:
    """A field's description as Markdown: brackets outside code are no links, and options are keys of the same model."""
    keys = {option(name, other): name for name, other in model.model_fields.items()}
    text = re.sub(
        r"--[a-z-]+", lambda found: f"`{keys[found[0]]}`" if found[0] in keys else found[0], field.description
    )
    # Several values on the command line are a mapping in YAML.
    text = re.sub(r"\w+=[\d.]*\w(,\w+=[\d.]*\w)+", lambda found: f"`{mapping(found[0])}`", text)
    values = [value for value in choices_in(field.annotation) if isinstance(value, str)]
    if len(values) > 1 and any(not re.search(rf"\b{re.escape(value)}\b", text) for value in values):
        listed = ", ".join(f"`{value}`" for value in values)
        text += f" Values: {listed}." if text.endswith(".") else f"; values: {listed}"
    # An option that is repeated as TASK=PATH is one mapping in YAML.
    pair = next((each.metavar for each in field.metadata if isinstance(each, Option) and each.repeated), None)
    if pair is not None and "=" in pair:
        text += f" A mapping: `{mapping(pair.lower())}`."
    return re.sub(r"(`[^`]*`)|([\[\]])", lambda found: found[1] or f"\\{found[2]}", text)


def option(name: str, field: Any) -> str:
    """The option that sets a field."""
    named = [each.name for each in field.metadata if isinstance(each, Option) and each.name]
    return named[0] if named else f"--{name.replace('_', '-')}"


def mapping(values: str) -> str:
    """``a=1,b=2`` as YAML."""
    return "{" + values.replace("=", ": ").replace(",", ", ") + "}"


def on_resume(model: type[Settings], name: str) -> str:
    """What ``--resume`` does with a key; nothing for one whose own keys say it."""
    mark, annotation = free_mark(model, name), model.model_fields[name].annotation
    if mark is None:
        return "" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else "decides"
    return "onward" if mark.told else "free"


def reference() -> str:
    """The tables of all keys as Markdown."""
    parts = []
    for title, prefix, model in TABLES:
        rows = [
            f"| `{prefix}{name}` | {default(field)} | {meaning(model, field)} | {on_resume(model, name)} |"
            for name, field in model.model_fields.items()
        ]
        head = [f"### {title}", "", "| key | default | meaning | `--resume` |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts)


def runs() -> str:
    """The table of published runs as Markdown."""
    rows = [
        f"| {run.model} | {run.parameters / 1e9:,.3g} | {_tokens(run.before)} to {_tokens(run.target)} | "
        f"{run.learning_rate:g}{' (LoRA)' if run.adapter else ''} | {_billions(run.tokens)} | "
        f"{'carries on' if run.carries_on else 'begins anew'} | {_link(run.source)} |"
        for run in published_runs()
    ]
    head = [
        "| model | 10^9 parameters | tokens of a sequence | learning rate | 10^9 tokens | schedule | source |"
    ]
    return "\n".join([*head, "|" + " --- |" * 7, *rows])


def _tokens(length: int | None) -> str:
    return "–" if length is None else format_length(length)


def _billions(tokens: int | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e9:,.3g}"


def _link(source: str) -> str:
    """A source with a short name for an address."""
    if not source.startswith("https://"):
        return source
    return f"[{source.split('/')[2].removeprefix('www.')}/{source.split('/')[3]}]({source})"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    wanted = text
    for begin, end, part in ((BEGIN, END, reference()), (RUNS, END_OF_RUNS, runs())):
        before, rest = wanted.split(begin)
        wanted = f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"
    schema = json.dumps(recipe_schema(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if wanted == text and SCHEMA_FILE.read_text(encoding="utf-8") == schema else 1
    PAGE.write_text(wanted, encoding="utf-8")
    SCHEMA_FILE.write_text(schema, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
