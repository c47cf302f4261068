"""What may import what: the floors of ``floors.toml``, and where frameworks may be named."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from paths import ROOT, product

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FRAMEWORKS = {"torch", "horovod", "mxnet", "mpi4py", "tensorflow", "jax"}
#: what takes long to import, or may be missing
HEAVY = FRAMEWORKS | {"numpy", "matplotlib", "scipy", "sklearn"}
TABLE = tomllib.loads((ROOT / "floors.toml").read_text())
FLOORS = {room: number for number, floor in enumerate(TABLE["floor"]) for room in floor["rooms"]}
PROCESSES = set(TABLE["processes"]["modules"])
#: what is imported, one after the other, and what is not there yet
WITHOUT = {
    "bytesched bytesched.cli bytesched.commands.doctor bytesched.commands.report "
    "bytesched.trace.timeline bytesched.plugins": HEAVY,
    "bytesched.plugins.stores.scheduled": FRAMEWORKS,
    "bytesched.plugins.c10d.ddp bytesched.plugins.stores.training.begin "
    "bytesched.plugins.wave bytesched.plugins.burst": FRAMEWORKS - {"torch"},
}


class Import(NamedTuple):
    """One file that imports another."""

    source: str
    line: int
    target: str


def _room(file: str) -> str:
    """The longest room of the table that ``file`` lies in."""
    rooms = [room for room in FLOORS if file == room or file.startswith(f"{room}/")]
    return max(rooms, key=len, default="")


@cache
def _modules() -> dict[str, str]:
    return {_module(file): file for file in product()}


def _module(file: str) -> str:
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "bytesched" else ["bytesched", *parts])


def _source(file: str, node: ast.ImportFrom) -> str:
    """The module that ``node`` imports from, in full."""
    if not node.level:
        return node.module or ""
    # The last part is the file itself, which a package is not inside.
    inside = _module(file).split(".") + ([""] if file.endswith("/__init__.py") else [])
    return ".".join([*inside[: -node.level], *([node.module] if node.module else [])])


def _names(file: str) -> Iterator[tuple[str, int]]:
    """Every module that ``file`` imports, of whatever package, and the line."""
    for node in ast.walk(product()[file]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _source(file, node)
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield (name if name in _modules() else source), node.lineno


def _strings(file: str) -> Iterator[tuple[str, int]]:
    """Every string of ``file`` that may be meant to be imported, and the line."""
    for node in ast.walk(product()[file]):
        # A single word is a logger, or a folder.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.value, node.lineno


@cache
def _imports() -> list[Import]:
    """All imports of one file by another."""
    return [
        Import(file, line, _modules()[name])
        for file in product()
        for name, line in (*_names(file), *(s for s in _strings(file) if s[0] not in PROCESSES))
        if name in _modules() and _modules()[name] != file
    ]


def _circle(arrows: Iterable[tuple[str, str]]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for one, other in arrows:
        if one != other:
            graph.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_every_file_stands_on_a_floor() -> None:
    assert [file for file in product() if not _room(file)] == []
    assert set(FLOORS) - {_room(file) for file in product()} == set()


def test_imports_go_down() -> None:
    assert len(_imports()) > len(product())
    assert [i for i in _imports() if FLOORS[_room(i.target)] > FLOORS[_room(i.source)]] == []


def test_no_circle_among_files_and_rooms() -> None:
    assert _circle((i.source, i.target) for i in _imports()) == []
    assert _circle((_room(i.source), _room(i.target)) for i in _imports()) == []


def test_linked_folders_import_relatively_and_nothing_else_does() -> None:
    # A tool that reads the folder knows nothing of the name that it is installed under.
    found = []
    for file, tree in product().items():
        top = file.split("/")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                inside = f"{_source(file, node)}.".startswith(f"bytesched.{top}.")
                if bool(node.level) is not (inside and top != "bytesched"):
                    found.append(f"{file}:{node.lineno}")
    assert found == []


def test_every_file_and_package_says_what_it_is_for() -> None:
    assert [file for file, tree in product().items() if not ast.get_docstring(tree)] == []


def test_processes_can_be_started() -> None:
    for name in PROCESSES:
        assert "if __name__ == '__main__':" in ast.unparse(product()[_modules()[name]]), name


def test_frameworks_are_named_by_plugins_alone() -> None:
    found = [
        f"{file}:{line} imports {name}"
        for file in product()
        if not file.startswith(("plugins/", "bytesched/integrations/"))
        for name, line in _names(file)
        if name.split(".")[0] in FRAMEWORKS
    ]
    assert found == []


def test_plugins_are_reached_from_the_front_and_from_commands_alone() -> None:
    fronts = ("bytesched/__init__.py", "bytesched/integrations/")
    commands = ("bytesched/cli.py", "bytesched/commands/", "bytesched/doctor/", "bytesched/run/")
    into = [each for each in _imports() if each.target.startswith("plugins/")]
    assert [e for e in into if not e.source.startswith(("plugins/", *fronts, *commands))] == []


def test_a_framework_is_imported_by_its_own_plugin_alone(python: Callable[[str, str], str]) -> None:
    code = (
        f"import importlib, sys\nfor names, missing in {WITHOUT}.items():\n"
        "    for name in names.split():\n        importlib.import_module(name)\n"
        "        print(*missing & set(sys.modules), end='')"
    )
    assert python("-c", code) == ""
