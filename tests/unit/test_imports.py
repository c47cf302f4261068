"""What may import what: the floors of ``floors.toml``, and where frameworks may be named."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FRAMEWORKS = {"torch", "horovod", "mxnet", "mpi4py", "tensorflow", "jax"}
#: what takes long to import, or may be missing
HEAVY = FRAMEWORKS | {"numpy", "matplotlib", "skopt"}


@dataclass(frozen=True)
class Import:
    """One file that imports another."""

    source: str
    line: int
    target: str


class House:
    """The source files of a project, their imports, and its table of floors."""

    def __init__(self, root: Path) -> None:
        self.table = table = tomllib.loads((root / "floors.toml").read_text())
        self.floors = {
            room: number for number, floor in enumerate(table["floor"]) for room in floor["rooms"]
        }
        self.processes = set(table["processes"]["modules"])
        links = {root / "bytesched" / name for name in ("plugins", "tuning")}
        paths = [
            path
            for top in ("bytesched", "plugins", "tuning")
            for path in sorted((root / top).rglob("*.py"))
            if not links & set(path.parents)
        ]
        self.trees = {
            path.relative_to(root).as_posix(): ast.parse(path.read_text(), str(path))
            for path in paths
        }
        self.modules = {_module(file): file for file in self.trees}

    def room(self, file: str) -> str | None:
        """The longest room of the table that ``file`` lies in."""
        rooms = [room for room in self.floors if file == room or file.startswith(f"{room}/")]
        return max(rooms, key=len, default=None)

    def names(self, file: str) -> Iterator[tuple[str, int]]:
        """Every module that ``file`` imports, of whatever package, and the line."""
        for node in ast.walk(self.trees[file]):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = _source(file, node)
                for alias in node.names:
                    name = f"{source}.{alias.name}"
                    yield (name if name in self.modules else source), node.lineno

    def strings(self, file: str) -> Iterator[tuple[str, int]]:
        """Every string of ``file`` that may be meant to be imported, and the line."""
        for node in ast.walk(self.trees[file]):
            # A single word is a logger, or a folder.
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "." in node.value
                and node.value not in self.processes
            ):
                yield node.value, node.lineno

    def imports(self) -> list[Import]:
        """All imports of one file by another."""
        return [
            Import(file, line, self.modules[name])
            for file in self.trees
            for name, line in (*self.names(file), *self.strings(file))
            if name in self.modules and self.modules[name] != file
        ]

    def upward(self) -> list[str]:
        """The imports that go up."""
        return [
            f"{each.source}:{each.line} imports {each.target}"
            for each in self.imports()
            if self.floors[self._room(each.target)] > self.floors[self._room(each.source)]
        ]

    def circle(self) -> list[str]:
        """The files of one circle of imports, if there is one."""
        return _circle((each.source, each.target) for each in self.imports())

    def circle_of_rooms(self) -> list[str]:
        """The rooms of one circle of imports, if there is one."""
        return _circle((self._room(e.source), self._room(e.target)) for e in self.imports())

    def not_as_the_folder_does(self) -> list[str]:
        """Imports inside a linked folder that are absolute, and relative ones elsewhere."""
        return [
            f"{file}:{node.lineno}"
            for file, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            if bool(node.level) is not _is_inside(file, _source(file, node))
        ]

    def _room(self, file: str) -> str:
        room = self.room(file)
        assert room is not None, file
        return room


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


def _source(file: str, node: ast.ImportFrom) -> str:
    """The module that ``node`` imports from, in full."""
    if not node.level:
        return node.module or ""
    # The last part is the file itself, which a package is not inside.
    inside = _module(file).split(".") + ([""] if file.endswith("/__init__.py") else [])
    return ".".join([*inside[: -node.level], *([node.module] if node.module else [])])


def _is_inside(file: str, module: str) -> bool:
    """Whether ``module`` is in the same folder that is installed under another name."""
    top = file.split("/")[0]
    return top != "bytesched" and f"{module}.".startswith(f"bytesched.{top}.")


def _module(file: str) -> str:
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "bytesched" else ["bytesched", *parts])


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


def test_every_file_stands_on_a_floor(house: House) -> None:
    assert [file for file in house.trees if house.room(file) is None] == []
    assert set(house.floors) - {house.room(file) for file in house.trees} == set()


def test_imports_go_down(house: House) -> None:
    assert house.upward() == []


def test_no_circle_among_files(house: House) -> None:
    assert house.circle() == []


def test_no_circle_among_rooms(house: House) -> None:
    assert house.circle_of_rooms() == []


def test_a_few_floors_each_of_which_has_an_idea(house: House) -> None:
    ideas = [floor["idea"] for floor in house.table["floor"]]
    assert len(ideas) <= 10
    assert all(idea.endswith(".") for idea in ideas)


def test_linked_folders_import_relatively_and_nothing_else_does(house: House) -> None:
    # A tool that reads the folder knows nothing of the name that it is installed under.
    assert house.not_as_the_folder_does() == []


def test_every_file_and_package_says_what_it_is_for(house: House) -> None:
    assert [file for file, tree in house.trees.items() if not ast.get_docstring(tree)] == []


def test_processes_can_be_started(house: House) -> None:
    for name in house.processes:
        source = ast.unparse(house.trees[house.modules[name]])
        assert "if __name__ == '__main__':" in source, name


def test_frameworks_are_named_by_plugins_alone(house: House) -> None:
    found = [
        f"{file}:{line} imports {name}"
        for file in house.trees
        if not file.startswith(("plugins/", "bytesched/integrations/"))
        for name, line in house.names(file)
        if name.split(".")[0] in FRAMEWORKS
    ]
    assert found == []


def test_plugins_are_reached_from_the_front_and_from_commands_alone(house: House) -> None:
    fronts = ("bytesched/__init__.py", "bytesched/integrations/", "bytesched/testing/__init__.py")
    commands = ("bytesched/cli.py", "bytesched/commands/", "bytesched/doctor/", "bytesched/run/")
    allowed = ("plugins/", *fronts, *commands)
    found = [
        each
        for each in house.imports()
        if each.target.startswith("plugins/") and not each.source.startswith(allowed)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("modules", "missing"),
    [
        ("bytesched bytesched.cli bytesched.commands.doctor bytesched.plugins", HEAVY),
        ("bytesched.plugins.stores.scheduled", FRAMEWORKS),
        (
            "bytesched.plugins.c10d.ddp bytesched.plugins.stores.training.begin "
            "bytesched.plugins.wave bytesched.plugins.burst",
            FRAMEWORKS - {"torch"},
        ),
    ],
    ids=["front", "stores", "torch"],
)
def test_a_framework_is_imported_by_its_own_plugin_alone(modules: str, missing: set[str]) -> None:
    code = (
        f"import importlib, sys\nfor name in {modules.split()}:\n"
        f"    importlib.import_module(name)\n    print(*{missing} & set(sys.modules), end='')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True
    )
    assert run.stdout == ""


@pytest.fixture
def two_floors(tmp_path: Path) -> Path:
    """A project of two files, one above the other."""
    (tmp_path / "floors.toml").write_text(
        '[[floor]]\nrooms = ["bytesched/low.py"]\n'
        '[[floor]]\nrooms = ["bytesched/high"]\n'
        "[processes]\nmodules = ['bytesched.high.rank']\n"
    )
    (tmp_path / "bytesched" / "high").mkdir(parents=True)
    (tmp_path / "bytesched" / "low.py").write_text("")
    (tmp_path / "bytesched" / "high" / "__init__.py").write_text("import bytesched.low\n")
    (tmp_path / "bytesched" / "high" / "rank.py").write_text("from bytesched import low\n")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "import bytesched.high",
        "from bytesched.high import rank",
        "from bytesched import high",
        "def late():\n    import bytesched.high.rank",
        "if TYPE_CHECKING:\n    from bytesched.high import X",
        "importlib.import_module('bytesched.high')",
    ],
)
def test_an_import_that_goes_up_is_found(two_floors: Path, line: str) -> None:
    assert House(two_floors).upward() == []
    assert House(two_floors).circle() == []
    (two_floors / "bytesched" / "low.py").write_text(line)
    [found] = House(two_floors).upward()
    assert found.startswith("bytesched/low.py:")
    assert set(House(two_floors).circle()) >= {"bytesched/low.py"}


def test_a_file_without_a_floor_and_a_circle_in_a_room_are_found(two_floors: Path) -> None:
    (two_floors / "bytesched" / "low.py").write_text("run('bytesched.high.rank')")
    assert House(two_floors).upward() == []
    (two_floors / "bytesched" / "high" / "__init__.py").write_text("import bytesched.high.rank")
    (two_floors / "bytesched" / "high" / "rank.py").write_text("import bytesched.high")
    house = House(two_floors)
    assert house.upward() == []
    assert set(house.circle()) == {"bytesched/high/__init__.py", "bytesched/high/rank.py"}
    assert house.circle_of_rooms() == []
    (two_floors / "bytesched" / "new.py").write_text("")
    assert House(two_floors).room("bytesched/new.py") is None


@pytest.mark.parametrize(
    ("file", "line", "target"),
    [
        ("plugins/a/b.py", "from .c import x", "plugins/a/c.py"),
        ("plugins/a/b.py", "from . import c", "plugins/a/c.py"),
        ("plugins/a/__init__.py", "from .c import x", "plugins/a/c.py"),
        ("plugins/a/b.py", "from ..d import x", "plugins/d/__init__.py"),
        ("plugins/a/b.py", "def late():\n    from .. import d", "plugins/d/__init__.py"),
    ],
)
def test_a_relative_import_is_an_arrow(tmp_path: Path, file: str, line: str, target: str) -> None:
    (tmp_path / "floors.toml").write_text(
        '[[floor]]\nrooms = ["plugins/a", "plugins/d"]\n[processes]\nmodules = []\n'
    )
    for name in ("a/__init__", "a/b", "a/c", "d/__init__"):
        path = tmp_path / "plugins" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / file).write_text(line)
    house = House(tmp_path)
    assert [(each.source, each.target) for each in house.imports()] == [(file, target)]
    assert house.not_as_the_folder_does() == []
    (tmp_path / file).write_text("from bytesched.plugins.a import c")
    assert House(tmp_path).not_as_the_folder_does() == [f"{file}:1"]


def test_a_circle_among_rooms_of_one_floor_is_found(tmp_path: Path) -> None:
    (tmp_path / "floors.toml").write_text(
        '[[floor]]\nrooms = ["plugins/a", "plugins/b"]\n[processes]\nmodules = []\n'
    )
    for name, line in {"a/one": "", "a/two": "from ..b import one", "b/one": ""}.items():
        path = tmp_path / "plugins" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line)
    assert House(tmp_path).circle_of_rooms() == []
    (tmp_path / "plugins" / "b" / "two.py").write_text("from ..a import one")
    house = House(tmp_path)
    assert (house.upward(), house.circle()) == ([], [])
    assert set(house.circle_of_rooms()) == {"plugins/a", "plugins/b"}
