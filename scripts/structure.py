"""Measure the structure of a Python package: rooms, folders, thin modules, repeated names, circles, options.

python scripts/structure.py src/ropewalk [--order "cli > training,search > data > io"] [--json FILE]
python scripts/structure.py --compare BEFORE.json AFTER.json [...]

Only the source text is read; nothing of the package is imported. So the same measures can be taken of any package, and
of any commit of it (``git archive COMMIT src | tar -x -C FOLDER``). What each figure counts:

- *lines* are those of ``wc -l``; *lines of code* hold a token that is neither a comment nor part of a docstring, so
  that lines saved by dropping documentation show as such.
- A *room* is a top-level folder of the package or a module beside them. Its files are counted with those of its
  sub-rooms; *files per folder* are without.
- *CLI declarations* are calls of ``typer.Option`` and ``typer.Argument``, ``click.option`` and ``click.argument``,
  ``cyclopts.Parameter``, ``tyro.conf.arg``, and ``add_argument``.
- *Mirrored classes* are pairs of classes with fields (dataclasses, pydantic models, NamedTuples, TypedDicts) that
  declare at least four fields of the same name in their own bodies, neither being an ancestor of the other.
- A *thin neighbour* has one importer, another module of its own folder. Use through a name that a package's
  ``__init__`` hands on counts as importing the module that defines it; so does the ``__init__`` itself.
- *Long signatures* have seven parameters or more, ``self``, ``cls``, ``*args``, ``**kwargs`` and overloads left out.
  Functions that declare command-line options are counted apart.
- *Circles* are strongly connected components of the import graph with more than one file: once with imports inside
  functions and for type checkers included, once with those alone that run when a module is imported. The import of
  a parent package that ``import a.b.c`` implies is no arrow.
- *Arrows upward* are imports against ``--order``: levels from top to bottom, rooms of one level separated by commas.
  Rooms that it does not name are not judged.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

WIDE_FOLDER, SHORT_MODULE, LONG_MODULE, LONG_SIGNATURE, SHARED_FIELDS = 12, 60, 900, 7, 4
OPTIONS = {
    *("typer.Option", "typer.Argument", "click.option", "click.argument"),
    *("cyclopts.Parameter", "tyro.conf.arg"),
}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
VALUE_BASES = {
    **{"BaseModel": "pydantic", "BaseSettings": "pydantic"},
    **{"NamedTuple": "NamedTuple", "TypedDict": "TypedDict"},
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: dotted, the package's own name included; of an ``__init__`` it is the folder's.
        path: relative to the package's folder.
        text: the source.
    """

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        return self.path.parts[0] if len(self.path.parts) > 1 else self.path.stem

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def lines_of_code(self) -> int:
        documented = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        held = {line for t in tokens if t.type not in NO_CODE for line in range(t.start[0], t.end[0] + 1)}
        return len(held - documented)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Dotted names by what the module calls them."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                    for a in node.names
                }
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return found

    def dotted(self, node: ast.AST) -> str:
        """The dotted name of an expression, imports resolved; empty if it is none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])

    def declares_option(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and (
            self.dotted(node.func) in OPTIONS
            or (isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument")
        )


@dataclass(frozen=True)
class Fields:
    """A class that holds values: where it is, what it is made with, and the fields of its own body."""

    name: str
    module: str
    kind: str
    bases: frozenset[str]
    own: frozenset[str]


@dataclass
class Package:
    """All modules of a package and the arrows between them."""

    modules: dict[str, Module]
    arrows: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By module, the modules that it imports anywhere."""
    arrows_at_import: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """As ``arrows``, with names that an ``__init__`` hands on counted as their own modules too."""

    @classmethod
    def read(cls, folder: Path) -> Package:
        """Read every ``.py`` below a folder."""
        modules = {}
        for path in sorted(folder.rglob("*.py")):
            short = path.relative_to(folder)
            parts = short.parent.parts if path.name == "__init__.py" else short.with_suffix("").parts
            name = ".".join([folder.resolve().name, *parts])
            modules[name] = Module(name, short, path.read_text(encoding="utf-8"))
        package = cls(modules)
        handed_on = {m.name: package._handed_on(m) for m in modules.values() if m.is_package}
        for module in modules.values():
            for target, name, at_import in package._imports(module):
                if target == module.name:
                    continue
                package.arrows[module.name].add(target)
                if at_import:
                    package.arrows_at_import[module.name].add(target)
                package.uses[module.name] |= {target, package._home(handed_on, target, name)}
        for name, homes in handed_on.items():
            package.uses[name] |= set(homes.values())
        for name, used in package.uses.items():
            used.discard(name)
        return package

    def _imports(self, module: Module) -> Iterator[tuple[str, str, bool]]:
        """Module that is imported, name that is taken from it (or nothing), and whether at import time."""

        def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, str, bool]]:
            if isinstance(node, ast.Import):
                yield from ((a.name, "", at_import) for a in node.names if a.name in self.modules)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(module, node)
                for alias in node.names:
                    if f"{base}.{alias.name}" in self.modules:
                        yield f"{base}.{alias.name}", "", at_import
                    elif base in self.modules:
                        yield base, alias.name, at_import
            elif isinstance(node, ast.If) and module.dotted(node.test).endswith("TYPE_CHECKING"):
                for child in node.body:
                    yield from walk(child, False)
                for child in node.orelse:
                    yield from walk(child, at_import)
            else:
                inside = at_import and not isinstance(node, (*FUNCTION, ast.Lambda))
                for inner in ast.iter_child_nodes(node):
                    yield from walk(inner, inside)

        return walk(module.tree, True)

    @staticmethod
    def _base(module: Module, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.name.split(".")
        up = node.level - 1 if module.is_package else node.level
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def _handed_on(self, module: Module) -> dict[str, str]:
        """Homes of the names that an ``__init__`` imports, or lists in a table of lazy imports."""
        found = {name: target for target, name, _ in self._imports(module) if name}
        for node in module.tree.body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Dict):
                pairs = [
                    (getattr(k, "value", None), getattr(v, "value", None))
                    for k, v in zip(value.keys, value.values, strict=True)
                ]
                homes = {
                    k: f"{module.name}.{v}" for k, v in pairs if isinstance(k, str) and isinstance(v, str)
                }
                if len(homes) == len(pairs) and set(homes.values()) <= set(self.modules):
                    found |= homes
        return found

    @staticmethod
    def _home(handed_on: dict[str, dict[str, str]], module: str, name: str) -> str:
        """The module that a name comes from, through any number of ``__init__``."""
        seen = set()
        while name in handed_on.get(module, {}) and module not in seen:
            seen.add(module)
            module = handed_on[module][name]
        return module

    def thin_neighbours(self) -> list[str]:
        """Modules that one other of their folder imports and nobody else, each with it."""
        importers = defaultdict(set)
        for name, targets in self.uses.items():
            for target in targets:
                importers[target].add(name)
        thin = []
        for name, module in self.modules.items():
            if module.is_package or len(importers[name]) != 1:
                continue
            importer = self.modules[next(iter(importers[name]))]
            if importer.path.parent == module.path.parent and not importer.is_package:
                thin.append(f"{name} <- {importer.name}")
        return thin

    def arrows_upward(self, order: list[list[str]]) -> list[str]:
        """Imports from a room that stands lower in the order to one that stands higher."""
        level = {room: depth for depth, rooms in enumerate(order) for room in rooms}
        return sorted(
            f"{name} -> {target}"
            for name, targets in self.arrows.items()
            for target in targets
            if level.get(self.modules[name].room, -1) > level.get(self.modules[target].room, len(order))
        )

    def classes_with_fields(self) -> list[Fields]:
        """All classes, nested ones included, that declare fields."""
        classes = [(m, name, node) for m in self.modules.values() for name, node in _classes(m.tree)]
        known = {name for _, name, _ in classes}
        bases = {
            name: frozenset(_known(module.dotted(base), known) for base in node.bases)
            for module, name, node in classes
        }
        result = []
        for module, name, node in classes:
            above = _ancestors(name, bases)
            kinds = [kind for base, kind in VALUE_BASES.items() if base in above]
            if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                kinds = ["dataclass"]
            own = frozenset(_fields(node))
            if kinds and own:
                result.append(Fields(name, module.name, kinds[0], above, own))
        return result


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or "ClassVar" in ast.unparse(each.annotation):
            continue
        if isinstance(each.target, ast.Name):
            yield each.target.id


def _known(base: str, known: set[str]) -> str:
    """A base class as the package's classes are called (``Layer.Config``), else its last name."""
    parts = base.split(".")
    return next((".".join(parts[n:]) for n in range(len(parts)) if ".".join(parts[n:]) in known), parts[-1])


def _classes(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """All classes below a node, by their names and those of the classes around them."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, ast.ClassDef):
            name = f"{outer}.{child.name}" if outer else child.name
            yield name, child
        yield from _classes(child, name)


def _ancestors(name: str, bases: dict[str, frozenset[str]]) -> frozenset[str]:
    found: set[str] = set()
    new = set(bases.get(name, ()))
    while new:
        found |= new
        new = {b for n in new for b in bases.get(n, ())} - found
    return frozenset(found)


def mirrored(classes: list[Fields]) -> list[dict[str, Any]]:
    """Pairs of classes that declare the same fields, most shared fields first."""
    pairs = []
    for a, b in combinations(classes, 2):
        shared = a.own & b.own
        related = a.name in b.bases or b.name in a.bases
        if len(shared) >= SHARED_FIELDS and not related:
            pairs.append(
                {
                    "a": f"{a.module}.{a.name}",
                    "b": f"{b.module}.{b.name}",
                    "kinds": f"{a.kind}, {b.kind}",
                    "shared": sorted(shared),
                }
            )
    return sorted(pairs, key=lambda pair: (-len(pair["shared"]), pair["a"], pair["b"]))


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one member: files that each reach all others of theirs."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        found, new = set(), set(arrows[start])
        while new:
            found |= new
            new = {target for name in new for target in arrows.get(name, ())} - found
        reached[start] = found
    members = [name for name in reached if name in reached[name]]
    components = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in members}
    return sorted(sorted(component) for component in components)


def long_signatures(module: Module) -> Iterator[tuple[str, bool]]:
    """Functions of many parameters, and whether each declares command-line options."""
    for node in ast.walk(module.tree):
        if not isinstance(node, FUNCTION) or any("overload" in ast.unparse(d) for d in node.decorator_list):
            continue
        a = node.args
        count = sum(arg.arg not in ("self", "cls") for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs))
        if count >= LONG_SIGNATURE:
            outside = [
                *node.decorator_list,
                *a.defaults,
                *a.kw_defaults,
                *(x.annotation for x in (*a.args, *a.kwonlyargs)),
            ]
            command = any(
                module.declares_option(n) for each in outside if each is not None for n in ast.walk(each)
            )
            yield f"{module.name}:{node.name} ({count})", command


def public_names(module: Module) -> tuple[set[str], set[str]]:
    """Names in ``__all__`` or imported ``as`` themselves, and public functions and classes at the top of a module."""
    listed = {
        alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            listed |= {
                n.value
                for n in ast.walk(node.value)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
    defined = {
        n.name
        for n in module.tree.body
        if isinstance(n, (*FUNCTION, ast.ClassDef)) and not n.name.startswith("_")
    }
    return listed, defined


def repeated(names: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that occur in more than one place, with the places, most first."""
    places = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    several = {name: found for name, found in places.items() if len(found) > 1}
    return dict(sorted(several.items(), key=lambda item: (-len(item[1]), item[0])))


def rooms(package: Package) -> dict[str, dict[str, int]]:
    """Files, lines and lines of code by room, then by ``room/sub-room``; an ``__init__`` beside them is ``.``."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for module in package.modules.values():
        folders = module.path.parent.parts
        keys = ["/".join(folders[: n + 1]) for n in range(min(len(folders), 2))] or ["."]
        for key in keys:
            found[key].update(files=1, lines=module.lines, lines_of_code=module.lines_of_code)
    return {key: dict(found[key]) for key in sorted(found)}


def measure(folder: Path, order: list[list[str]] | None = None) -> dict[str, Any]:
    """All figures of the package in a folder; the module's docstring says what each counts."""
    package = Package.read(folder)
    modules = package.modules
    plain = [m for m in modules.values() if not m.is_package]
    signatures = [each for m in modules.values() for each in long_signatures(m)]
    names = {m.name: public_names(m) for m in modules.values()}
    tops = [(n.name, m.name) for m in modules.values() for n in m.tree.body if isinstance(n, ast.ClassDef)]
    calls = Counter(
        (m.dotted(n.func) if m.dotted(n.func) in OPTIONS else "add_argument")
        for m in modules.values()
        for n in ast.walk(m.tree)
        if isinstance(n, ast.Call) and m.declares_option(n)
    )
    folders = Counter("/".join(m.path.parent.parts) or "." for m in modules.values())
    lists: dict[str, Any] = {
        "folders_above_12_files": {k: v for k, v in folders.most_common() if v > WIDE_FOLDER},
        "cli_declarations": dict(calls),
        "mirrored_classes": mirrored(package.classes_with_fields()),
        "repeated_class_names": repeated(tops),
        "repeated_module_names": repeated([(m.path.stem, m.name) for m in plain]),
        "thin_neighbours": package.thin_neighbours(),
        "long_signatures": [name for name, command in signatures if not command],
        "long_signatures_of_commands": [name for name, command in signatures if command],
        "circles": circles(package.arrows),
        "circles_at_import": circles(package.arrows_at_import),
        "modules_below_60_lines": [f"{m.name} ({m.lines})" for m in plain if m.lines < SHORT_MODULE],
        "modules_above_900_lines": [f"{m.name} ({m.lines})" for m in plain if m.lines > LONG_MODULE],
    }
    if order:
        lists["arrows_upward"] = package.arrows_upward(order)
    figures = {
        "files": len(modules),
        "lines": sum(m.lines for m in modules.values()),
        "lines_of_code": sum(m.lines_of_code for m in modules.values()),
        "median_lines_of_a_module": sorted(m.lines for m in plain)[len(plain) // 2] if plain else 0,
        "public_definitions": sum(len(defined) for _, defined in names.values()),
        "public_names": sum(len(listed | defined) for listed, defined in names.values()),
        **{
            key: sum(found.values()) if key == "cli_declarations" else len(found)
            for key, found in lists.items()
        },
        "files_in_circles": sum(map(len, lists["circles"])),
        "files_in_circles_at_import": sum(map(len, lists["circles_at_import"])),
    }
    return {"figures": figures, "rooms": rooms(package), "lists": lists}


def _print(result: dict[str, Any], full: bool) -> None:
    for key, value in result["figures"].items():
        print(f"{key:32} {value:>9,}")
    print(f"\n{'room':32} {'files':>9} {'lines':>9} {'of code':>9}")
    for room, counts in result["rooms"].items():
        print(f"{room:32} {counts['files']:>9,} {counts['lines']:>9,} {counts['lines_of_code']:>9,}")
    if full:
        print(json.dumps(result["lists"], indent=1))


def _compare(paths: list[Path]) -> None:
    results = [json.loads(path.read_text()) for path in paths]
    print("| figure | " + " | ".join(f"{r['project']} {r['commit'][:7]}" for r in results) + " |")
    print("| --- |" + " ---: |" * len(results))
    for key in dict.fromkeys(key for r in results for key in r["figures"]):
        print(
            f"| {key.replace('_', ' ')} | "
            + " | ".join(f"{r['figures'].get(key, '-'):,}" if key in r["figures"] else "-" for r in results)
            + " |"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the structure of a Python package.")
    parser.add_argument("folder", nargs="?", type=Path, help="the package's folder, for example src/ropewalk")
    parser.add_argument("--order", help="rooms from top to bottom: 'cli > training,search > data > io'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, rooms and lists")
    parser.add_argument("--project", help="name in the file; the folder's if not given")
    parser.add_argument("--commit", default="", help="commit in the file")
    parser.add_argument("--lists", action="store_true", help="print the lists behind the figures too")
    parser.add_argument("--brief", action="store_true", help="leave the lists out of the file")
    parser.add_argument(
        "--compare", nargs="+", type=Path, metavar="FILE", help="a table of files written before"
    )
    options = parser.parse_args(arguments)
    if options.compare:
        _compare(options.compare)
        return
    if options.folder is None or not options.folder.is_dir():
        sys.exit(f"structure: {options.folder} is no folder; name the package's, for example src/ropewalk")
    order = [
        [room.strip() for room in level.split(",")]
        for level in (options.order or "").split(">")
        if level.strip()
    ]
    result = measure(options.folder, order)
    _print(result, options.lists)
    if options.json:
        about = {"benchmark": "structure", "date": datetime.now(UTC).strftime("%Y-%m-%d")}
        if options.brief:
            del result["lists"]
        about |= {"project": options.project or options.folder.resolve().name, "commit": options.commit}
        options.json.write_text(json.dumps({**about, "order": options.order, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
