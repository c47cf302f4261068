"""What may import what: the floors of ``floors.toml``, and where frameworks may be named."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
        table = tomllib.loads((root / "floors.toml").read_text())
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
                assert not node.level, f"{file}:{node.lineno}: import absolutely"
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    yield (name if name in self.modules else node.module or ""), node.lineno

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
        """The imports that do not go down."""
        found = []
        for each in self.imports():
            here, there = self.room(each.source), self.room(each.target)
            assert here is not None, each
            assert there is not None, each
            if here != there and self.floors[there] >= self.floors[here]:
                found.append(f"{each.source}:{each.line} imports {each.target}")
        return found

    def circle(self) -> list[str]:
        """The files of one circle of imports, if there is one."""
        graph: dict[str, set[str]] = {file: set() for file in self.trees}
        for each in self.imports():
            graph[each.source].add(each.target)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            files: list[str] = error.args[1]
            return files
        return []


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
    commands = ("bytesched/cli.py", "bytesched/doctor/explain.py", "bytesched/run/")
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
        ("bytesched bytesched.cli bytesched.doctor.command bytesched.plugins", HEAVY),
        ("bytesched.plugins.kvstore", FRAMEWORKS),
        (
            "bytesched.plugins.c10d.ddp bytesched.plugins.kvstore.training.begin "
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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
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
    (two_floors / "bytesched" / "new.py").write_text("")
    assert House(two_floors).room("bytesched/new.py") is None
