"""Recipes that are changed between two runs, and what the second one says."""

import json
from pathlib import Path

import yaml

from ropewalk.cli.app import main
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe


def recipe_of(values, **changed) -> Recipe:
    return parse_recipe(yaml.safe_dump({**values, **changed}), "test")


def with_stage(values, number=0, **changed):
    """The recipe with other keys in one stage."""
    stages = list(values["stages"])
    stages[number] = {**stages[number], **changed}
    return {**values, "stages": stages}


def weights_of(output) -> bytes:
    return (Path(output) / "model" / "model.safetensors").read_bytes()


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.told = []

    def note(self, line):
        self.told.append(line)

    def bar(self, label, total):
        from ropewalk.io.progress import Silent

        return Silent().bar(label, total)


def write(path: Path, values) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def refused(capsys, tmp_path, values, *options: str) -> str:
    """The one sentence of a refused resume, with exit status 2."""
    status = main(["extend", write(tmp_path / "recipe.yaml", values), "--resume", *options])
    errors = capsys.readouterr().err
    assert status == 2, errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    return lines[0]


def metrics_of(output) -> list[tuple]:
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(line["stage"], line["step"], line["loss"], line["tokens"]) for line in found]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
