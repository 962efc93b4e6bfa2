"""Write src/ropewalk/keywords.py, the keywords of each job for type checkers and editors, from the settings.

python scripts/job_keywords.py [--check]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator

from ropewalk.io.calls import keywords_of, owner_of
from ropewalk.io.settings import DOCUMENTS, MODEL_NAME, model_in, option_of
from ropewalk.jobs import JOBS

FILES = (DOCUMENTS, MODEL_NAME, "a folder or a Hub id")
"""What the description of a text says that may also be a path."""
FILE = Path(__file__).resolve().parents[1] / "src" / "ropewalk" / "keywords.py"

BEGINNING = '''\
"""Keywords of each job and the values that they take, for type checkers and editors.

Written by scripts/job_keywords.py from the settings; :mod:`ropewalk.io.calls` reads the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from ropewalk.io.settings import Settings
'''


OF_SCHEMAS = {"string": "str", "integer": "int"}


def also(validator: Any) -> Iterator[str]:
    """What a validator that runs before pydantic's accepts; the text of the command line unless it is marked."""
    for schema in getattr(validator, "written", ({"type": "string"},)):
        yield OF_SCHEMAS[schema["type"]] if "type" in schema else type(schema["const"]).__name__


def forms(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[str]:
    """What a value of an annotation may be written as."""
    for each in metadata:
        if isinstance(each, BeforeValidator):
            yield from also(each.func)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from forms(parts[0], parts[1:])
    elif origin in (Union, UnionType):
        for part in parts:
            yield from forms(part)
    elif origin is Literal:
        yield f"Literal[{', '.join(map(repr, parts))}]"
    elif origin is tuple:
        items = set(parts) - {Ellipsis}
        inner = " | ".join(dict.fromkeys(form for item in parts if item in items for form in forms(item)))
        yield f"Sequence[{inner}]"
        if parts[-1] is Ellipsis:
            yield inner
    elif origin is dict:
        yield f"Mapping[str, {' | '.join(dict.fromkeys(forms(parts[1])))}]"
    elif model_in(annotation) is not None:
        yield from ("Mapping[str, Any]", "Settings")
    elif annotation is NoneType:
        yield "None"
    elif annotation is Path:
        yield from ("str", "PathLike[str]")
    else:
        yield {Any: "Any"}.get(annotation) or annotation.__name__


def field_type(model: type[BaseModel], name: str) -> str:
    """A field's type as its keyword takes it, None last."""
    field = model.model_fields[name]
    found = [*forms(Annotated[field.annotation, *field.metadata, ...])]
    validators = list(model.__pydantic_decorators__.field_validators.values())
    for each in validators:
        if each.info.mode == "before" and name in each.info.fields:
            found += also(each.func)
    if (inner := model_in(field.annotation)) is not None:
        of_model = inner.__pydantic_decorators__.model_validators.values()
        found += [form for each in of_model if hasattr(each.func, "written") for form in also(each.func)]
    if "str" in found and any(phrase in str(field.description) for phrase in FILES):
        found.append("PathLike[str]")
    if "KEY=VALUE" in (option_of(field).metavar or ""):
        found.append("Mapping[str, Any]")
    return " | ".join(sorted(dict.fromkeys(found), key=lambda form: form == "None"))


def text() -> str:
    """The whole module."""
    classes = []
    for job, (first, kinds) in JOBS.items():
        paths = {name: path for name, path in keywords_of(*kinds).items() if name != first}
        lines = "".join(
            f"    {name}: {field_type(owner_of(kinds, path), path[-1])}\n"
            for name, path in sorted(paths.items())
        )
        head = f"class {job.title()}Keywords(TypedDict, total=False):"
        classes.append(f'{head}\n    """Keywords of :func:`ropewalk.{job}`."""\n\n{lines}')
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    module = "\n\n".join([BEGINNING, *classes])
    return subprocess.run(ruff, input=module, capture_output=True, text=True, check=True).stdout


def main() -> None:
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        sys.exit(f"{FILE.name} is stale; run python scripts/job_keywords.py")


if __name__ == "__main__":
    main()
