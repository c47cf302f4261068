"""What may import what: no framework in the core, and dependencies that point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

FRAMEWORKS = {"torch", "horovod", "mxnet", "mpi4py", "tensorflow", "jax"}

#: The spine, from the ground up: each module may import those of earlier rows and nothing else.
#: All other modules of the core stand around it; they import it and each other, without cycles.
SPINE: tuple[frozenset[str], ...] = (
    frozenset({"errors", "environment", "files", "table", "version"}),
    frozenset({"values"}),
    frozenset({"config"}),
    frozenset({"log", "task"}),
    frozenset({"policy"}),
    frozenset({"order"}),
    frozenset({"core"}),
    frozenset({"transport", "observe"}),
    frozenset({"scheduler"}),
)
COMMANDS = frozenset({"cli", "bench", "doctor", "run"})


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield every module that a file imports, in full, and whether that happens on import."""
    tree = ast.parse(path.read_text(), str(path))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: import absolutely"
            module = node.module or ""
            if module in {"bytesched", "bytesched.plugins"}:
                for alias in node.names:
                    yield f"{module}.{alias.name}", id(node) in top
            else:
                yield module, id(node) in top


def _core_parts(path: Path) -> set[str]:
    parts = {name.split(".")[1] for name, _ in _imports(path) if name.startswith("bytesched.")}
    return parts & {source.stem for source in _sources("bytesched")}


@pytest.mark.parametrize("module", ["bytesched", "bytesched.cli", "bytesched.doctor.command"])
def test_import_leaves_frameworks_alone(module: str) -> None:
    code = (
        f"import {module}, sys; print(*{FRAMEWORKS | {'numpy', 'matplotlib'}} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == ""


@pytest.mark.parametrize("path", _sources("bytesched"), ids=lambda path: path.stem)
def test_core_names_no_framework(path: Path) -> None:
    assert not FRAMEWORKS & {name.split(".")[0] for name, _ in _imports(path)}


@pytest.mark.parametrize("path", _sources("bytesched"), ids=lambda path: path.stem)
def test_core_reaches_plugins_only_from_the_front_and_late(path: Path) -> None:
    for name, on_import in _imports(path):
        if name.startswith(("bytesched.plugins", "bytesched.tuning")):
            assert path.stem == "__init__"
            assert not on_import


@pytest.mark.parametrize("row", range(len(SPINE)))
def test_spine_points_down(row: int) -> None:
    below: set[str] = set().union(*SPINE[:row])
    for module in SPINE[row]:
        assert _core_parts(ROOT / "bytesched" / f"{module}.py") <= below, module


def test_core_has_no_cycle() -> None:
    graph = {path.stem: _core_parts(path) for path in _sources("bytesched")}
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", _sources("bytesched"), ids=lambda path: path.stem)
def test_commands_are_reached_from_the_command_line_alone(path: Path) -> None:
    allowed = {"__main__": {"cli"}}.get(path.stem, set())
    assert _core_parts(path) & COMMANDS <= allowed


@pytest.mark.parametrize("path", _sources("tuning"), ids=lambda path: path.stem)
def test_tuning_knows_no_plugin_and_no_framework(path: Path) -> None:
    for name, _ in _imports(path):
        assert name.split(".")[0] not in FRAMEWORKS
        assert not name.startswith("bytesched.plugins")


@pytest.mark.parametrize("path", _sources("bytesched/burst"), ids=lambda path: path.stem)
def test_the_planner_knows_no_plugin_and_no_framework(path: Path) -> None:
    for name, _ in _imports(path):
        assert name.split(".")[0] not in FRAMEWORKS
        assert not name.startswith(("bytesched.plugins", "bytesched.tuning"))


@pytest.mark.parametrize("folder", ["bytesched", "plugins", "tuning"])
def test_nothing_imports_the_modules_beside_the_core(folder: str) -> None:
    beside = ("bytesched.burst", "bytesched.plugins.burst", "bytesched.plugins.wave")
    for path in _sources(folder):
        assert not {name for name, _ in _imports(path) if name.startswith(beside)}, path


PLUGINS = [path for folder in ("", "burst", "wave") for path in _sources(f"plugins/{folder}")]


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_know_neither_tuning_nor_commands(path: Path) -> None:
    names = {name for name, _ in _imports(path)}
    assert not {name for name in names if name.startswith("bytesched.tuning")}
    assert not names & {f"bytesched.{command}" for command in COMMANDS}
