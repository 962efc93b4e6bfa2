"""The model card beside an exported model: what was trained, on what, how it was measured, and how to use it.

A card is ``README.md`` in the model's folder. One that somebody wrote or edited is never replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ropewalk.compatibility import readings, sentences
from ropewalk.data.read.embedded import EMBEDDED, RETRIEVAL, resolve_model
from ropewalk.data.read.files import HUGGING_FACE
from ropewalk.data.read.hub import parse_hugging_face
from ropewalk.data.settings import TOKENS
from ropewalk.evaluation.comparison import ScoreDifference
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import score_rows
from ropewalk.io.files import parse_json, write_text
from ropewalk.models.checkpoint.card import CARD, is_own_card, signed_card
from ropewalk.models.checkpoint.export import ExportResult
from ropewalk.models.checkpoint.origin import origin_of
from ropewalk.models.config.auto_class import name_of_class
from ropewalk.models.config.file import read_config_file, read_model_config
from ropewalk.reporting.run.before_after import conclusion, difference_tables, run_differences, run_results
from ropewalk.reporting.scores.tables import list_table
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import ResultTable
from ropewalk.rope import LongRope
from ropewalk.training.final_weights import describe_weights
from ropewalk.training.folder import MODEL, RECIPE, SUMMARY
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.versions import VERSION

HOME = "https://github.com/ropewalk/ropewalk"
HUB = "https://huggingface.co"
TAGS = ("long-context", "rope", "ropewalk")
PLACE = "path/to/this/folder"
"""Stands for the model in a card's commands until it has a name on the Hub."""

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


_At = tuple[int, Mapping[str, Any]]
"""A context in tokens, and the RoPE for it."""


def write_model_card(output: Path, repository: str | None = None) -> Path | None:
    """Write the card of a finished run's model, unless somebody else's card is there.

    Args:
        output: folder of the run.
        repository: name of the model on the Hub, for the commands in the card; None if it has none yet.

    Returns:
        Path of the card; None if the card there was not written by this program, or was edited.
    """
    path = output / MODEL / CARD
    # A link may lead to a file outside the folder, which must not be overwritten.
    if path.is_symlink() or (path.exists() and not is_own_card(path)):
        return None
    summary = parse_json((output / SUMMARY).read_text(encoding="utf-8"), strict=True)
    recipe = parse_recipe((output / RECIPE).read_text(encoding="utf-8"), str(output / RECIPE))
    readers = sentences(readings(str(output / MODEL), repository or PLACE), summary["context"])
    note = read_model_config(str(output / MODEL)).indexer_note
    loads = name_of_class(read_config_file(str(output / MODEL)).get("model_type"))
    write_text(path, signed_card(run_card(summary, recipe, readers, repository, note, loads)))
    return path


def write_export_card(found: ExportResult, repository: str | None = None) -> Path | None:
    """Write the card of a checkpoint that was written with another RoPE, unless somebody else's card is there.

    Args:
        found: the checkpoint.
        repository: as in :func:`write_model_card`.

    Returns:
        Path of the card; None if the card there was not written by this program, or was edited.
    """
    path = found.out / CARD
    if path.is_symlink() or (path.exists() and not is_own_card(path)):
        return None
    write_text(path, signed_card(export_card(found, repository)))
    return path


def export_card(found: ExportResult, repository: str | None = None) -> str:
    """Text of the card of a checkpoint that was written with another RoPE and unchanged weights."""
    place = resolve_model(found.model)
    # A bundled model is a folder inside the package, whose name would tell a reader nothing.
    origin = origin_of(place, found.model if found.model in (EMBEDDED, RETRIEVAL) else None)
    before, source = read_model_config(place), asdict(origin)
    rope = before.full_attention_rope
    context = found.max_position_embeddings
    readers = sentences(readings(str(found.out), repository or PLACE), context)
    loads = name_of_class(read_config_file(str(place)).get("model_type"))
    parts = [
        _front_matter(_metadata(source, None, False)),
        f"# {_plain(origin.name)} for {context:,} tokens",
        "Only the RoPE of its config was changed: the weights are those of the source model, and nothing was trained.",
        _from(
            source,
            VERSION,
            (before.trained_length, {"method": rope.name, **rope.to_entry()}),
            (context, {"method": found.method.name, **found.method.to_entry()}),
        ),
        "## Use",
        _use(repository or PLACE, context, loads),
        _bullets(map(_plain, (*found.notes, *readers))),
        "## Limits",
        _bullets(["No ability of this model was measured.", *_licence_unknown(source)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def run_card(
    summary: Mapping[str, Any],
    recipe: Recipe,
    readers: Sequence[str],
    repository: str | None = None,
    untrained: str | None = None,
    loads: str = "AutoModelForCausalLM",
) -> str:
    """Text of the card of a run's model.

    Args:
        summary: content of the run's ``summary.json``.
        recipe: recipe of the run.
        readers: which programs read the model's RoPE, one sentence each.
        repository: as in :func:`write_model_card`.
        untrained: parts of the model that no training changes, in a sentence; None if there are none.
        loads: class of transformers that loads the model.
    """
    source, trained, context = summary["source"], summary["trained_length"], summary["context"]
    differences = run_differences(summary)
    ran = any(stage["steps"] for stage in summary["stages"])
    parts = [
        _front_matter(_metadata(source, recipe, ran)),
        f"# {_plain(source['name'])} for {context:,} tokens",
        _plain(conclusion(trained, context, differences)),
        _from(
            source,
            summary["versions"]["ropewalk"],
            (trained, source["rope"]),
            (context, summary["stages"][-1]),
        ),
        "## Training",
        _training(summary, recipe)
        if ran
        else "The weights are those of the source model: nothing was trained.",
        "## Evaluation",
        _evaluation(run_results(summary), differences),
        "## Use",
        _use(repository or PLACE, context, loads),
        *([_bullets(map(_plain, readers))] if readers else []),
        "## Limits",
        _bullets([*([_plain(_sentence(untrained))] if untrained else []), *_limits(summary, source)]),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(source: Mapping[str, Any], recipe: Recipe | None, trained: bool) -> dict[str, Any]:
    """Metadata that the Hugging Face Hub reads; what is not known is left out."""
    base = source["hub_id"]
    paths = [] if recipe is None else _paths(recipe)
    datasets = [parse_hugging_face(each)[0] for each in paths if each.startswith(HUGGING_FACE)]
    return {
        **({} if base is None else {"base_model": base}),
        # The Hub has no word for a model with other positions and the same weights.
        **({"base_model_relation": "finetune"} if base is not None and trained else {}),
        **({"datasets": list(dict.fromkeys(datasets))} if datasets else {}),
        **source["card"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(TAGS),
    }


def _front_matter(metadata: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=True, allow_unicode=True)}---"


def _paths(recipe: Recipe) -> list[str]:
    """Sources of all stages that train, and of the run's own documents, once each."""
    data = [recipe.data, *(recipe.stage(n).data for n, stage in enumerate(recipe.stages) if stage.steps)]
    return list(dict.fromkeys(source.path for each in data for source in each.sources))


def _from(source: Mapping[str, Any], version: str, before: _At, after: _At) -> str:
    """Where the model comes from, and its context and RoPE before and after."""
    name = _plain(source["name"])
    linked = f"[{name}]({HUB}/{source['hub_id']})" if source["hub_id"] else name
    if source.get("revision"):
        linked += f" (revision {_plain(source['revision'])})"
    rows = [
        ("context in tokens", f"{before[0]:,}", f"{after[0]:,}"),
        ("RoPE", _rope_words(before[1]), _rope_words(after[1])),
    ]
    program = f"[ropewalk]({HOME}) {version}"
    lead = f"This is {linked} with its context extended by {program}."
    return f"{lead}\n\n{_table(('', 'before', 'after'), rows)}"


def _rope_words(rope: Mapping[str, Any]) -> str:
    factor = f", factor {rope['factor']:g}" if isinstance(rope.get("factor"), int | float) else ""
    return f"{_plain(rope['method'])}, base {rope['rope_theta']:,.0f}{factor}"


def _rope_of_stage(stage: Mapping[str, Any]) -> str:
    words = _rope_words(stage)
    if "kinds" in stage and stage["method"] != LongRope.name:
        words += ", as the long factors of a longrope"
    return words


def _training(summary: Mapping[str, Any], recipe: Recipe) -> str:
    rows = []
    for number_, (stage, planned) in enumerate(zip(summary["stages"], recipe.stages, strict=True), start=1):
        trained = (f"{stage['steps']:,}", f"{stage['tokens']:,}", f"{planned.learning_rate:g}")
        rows.append(
            (
                str(number_),
                f"{stage['context']:,}",
                _rope_of_stage(stage),
                _plain(stage["pattern"]),
                *(trained if stage["steps"] else ("0", "0", MISSING)),
            )
        )
    header = ("stage", "context", "RoPE", "attention pattern", "steps", "tokens", "peak learning rate")
    facts = [f"Data: {_data(summary, recipe)}", f"Precision: {summary['precision']}"]
    facts += [
        f"Stage {number}: {stage['kinds']['short']['rows_share']:.1%} of the rows have only "
        f"{stage['kinds']['short']['documents']}, with the RoPE from before the training"
        for number, stage in enumerate(summary["stages"], start=1)
        if "kinds" in stage
    ]
    chosen = [f"{name} {text}" for name in TOKENS if (text := getattr(recipe.data, name)) is not None]
    if chosen:
        facts.insert(1, f"Special tokens of the training data: {', '.join(chosen)}")
    if recipe.adapter is not None:
        facts.append(f"LoRA of rank {recipe.adapter.rank}, merged into the weights")
    if summary.get("exported") is not None:
        facts.append(f"Weights: {describe_weights(summary['exported'])}")
    versions = summary["versions"]
    facts.append(f"Software: torch {versions['torch']}, transformers {versions['transformers']}")
    return f"{_table(header, rows)}\n\n{_bullets(map(_plain, facts))}"


def _data(summary: Mapping[str, Any], recipe: Recipe) -> str:
    """Sources with their share of the tokens, without places on the machine that trained."""
    mixtures = [stage["mixture"] for stage in summary["stages"] if stage.get("mixture")]
    if mixtures:
        last = mixtures[-1]
        shares = [f"{shown(each['source'], 100)} ({each['share_achieved']:.1%})" for each in last["sources"]]
        of = "" if len(mixtures) == 1 else " in the last stage"
        return f"{', '.join(shares)} of {last['tokens_achieved']:,} tokens{of}"
    names = [
        path if path.startswith((HUGGING_FACE, "embedded")) else Path(path).name for path in _paths(recipe)
    ]
    # A recipe of packed rows names no sources.
    return ", ".join(names) or "rows that were packed before"


def _evaluation(results: Mapping[str, Sequence[TaskResult]], differences: Sequence[ScoreDifference]) -> str:
    """Every score before and after training, and their paired differences."""
    if not results["after"]:
        return "Nothing was measured."
    rows = [row for row in score_rows(results) if row.is_whole]
    scores = list_table("Scores with 95 % intervals", list(results), rows, ("task", "length"))
    limit = "Intervals count the samples alone, and not what another training run would give."
    return "\n\n".join([*map(_described, [scores, *difference_tables(differences)]), limit])


def _described(table: ResultTable) -> str:
    """A table in Markdown with its title and its notes."""
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    parts = (f"{_plain(table.title)}:", _table(table.header, rows), _bullets(map(_plain, table.notes)))
    return "\n\n".join(filter(None, parts))


def _use(model: str, context: int, loads: str) -> str:
    # A JSON string is a Python literal as well.
    quoted = json.dumps(model)
    return f"""```python
from transformers import {loads}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({quoted})
model = {loads}.from_pretrained({quoted}, dtype="auto")
```

```sh
vllm serve {model} --max-model-len {context}
```"""


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}."


def _limits(summary: Mapping[str, Any], source: Mapping[str, Any]) -> list[str]:
    after = [TaskResult.from_json(each) for each in summary["after"]]
    lengths = [each.length for each in after if each.status == "ok" and each.length is not None]
    longest = max(lengths, default=0)
    context = summary["context"]
    limits = []
    if longest < context:
        measured = (
            f"The longest inputs that were measured have {longest:,} tokens"
            if longest
            else "Nothing was measured"
        )
        limits.append(f"{measured}; the config states {context:,}.")
    else:
        limits.append(f"Inputs longer than {context:,} tokens were not measured.")
    limits.append("Abilities that the table does not name were not measured.")
    return [*map(_plain, limits), *_licence_unknown(source)]


def _licence_unknown(source: Mapping[str, Any]) -> list[str]:
    if source["card"].get("license") is not None:
        return []
    return ["The licence of the source model is not known here; its terms hold for this model as well."]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _plain(text: object) -> str:
    """Text on one line in which Markdown and HTML have no effect."""
    line = shown(str(text), 2000)
    return _MARKDOWN.sub(r"\\\1", line)
