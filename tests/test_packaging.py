"""The build table, the two links, and the one place where the version stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bytesched
from bytesched.checks import OPTIONAL

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "bytesched": "bytesched",
    "bytesched.burst": "bytesched/burst",
    "bytesched.plugins": "plugins",
    "bytesched.plugins.burst": "plugins/burst",
    "bytesched.plugins.wave": "plugins/wave",
    "bytesched.tuning": "tuning",
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_build_table_holds_every_package(project: dict[str, Any]) -> None:
    found = {
        str(init.parent.relative_to(ROOT))
        for folder in FOLDERS.values()
        for init in (ROOT / folder).rglob("__init__.py")
        if not any(parent.is_symlink() for parent in init.parents)
    }
    setuptools = project["tool"]["setuptools"]
    assert found == set(FOLDERS.values())
    assert setuptools["package-dir"] == FOLDERS
    assert set(setuptools["packages"]) == set(FOLDERS)


@pytest.mark.parametrize("name", ["plugins", "tuning"])
def test_link_points_home(name: str) -> None:
    link = ROOT / "bytesched" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


def _package_of(path: Path) -> str:
    """The folder of the innermost package around a file."""
    folders = [ROOT / folder for folder in FOLDERS.values()]
    return str(next(p for p in path.parents if p in folders).relative_to(ROOT))


def test_every_file_beside_the_code_is_packaged(project: dict[str, Any]) -> None:
    data = project["tool"]["setuptools"]["package-data"]
    for package, folder in FOLDERS.items():
        wanted = {
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file()
            and path.suffix not in {".py", ".pyc"}
            and not any(parent.is_symlink() for parent in path.parents)
            and _package_of(path) == folder
        }
        packaged = {p for glob in data.get(package, []) for p in (ROOT / folder).glob(glob)}
        assert wanted == packaged, package


def test_core_depends_on_nothing(project: dict[str, Any]) -> None:
    needed = [line for line in project["project"]["dependencies"] if "python_version" not in line]
    assert needed == []


def test_extras_are_complete_and_the_doctor_knows_them(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {"torch", "horovod", "mpi", "tune", "report", "test", "dev"}
    for package, extra in OPTIONAL.items():
        assert any(line.startswith(package) for line in extras[extra]), package


def test_version_stands_in_one_place(project: dict[str, Any]) -> None:
    assert project["project"]["dynamic"] == ["version"]
    assert bytesched.__version__.count(".") == 2


@pytest.mark.parametrize("name", ["plugins", "tuning"])
def test_second_copy_of_a_package_is_refused(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert f"bytesched.{name}" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "script",
    [
        "scripts/setup",
        "scripts/check",
        "scripts/test",
        "scripts/demo",
        "scripts/horovod-wheel",
        "scripts/mxnet-venv",
        ".ci/run",
    ],
)
def test_script_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)
    assert "set -euo pipefail" in path.read_text()


def test_horovods_compiler_gets_another_standard_and_run_path(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    compiler.chmod(0o755)
    flags = ["-std=c++14", "-std=gnu++11", "-std=c11", "-Wl,-rpath,/build/lib:/x", "a b", "*"]
    run = subprocess.run(
        [ROOT / "scripts" / "horovod-cxx", *flags],
        env={**os.environ, "HOROVOD_CXX": str(compiler)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    run_path = "-Wl,-rpath,$ORIGIN/../../../..:$ORIGIN/../../torch/lib"
    assert run.stdout.split("|") == ["-std=gnu++20"] * 2 + ["-std=c11", run_path, "a b", "*", ""]


def _horovod_wheel(python: Path | str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "horovod-wheel", python],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_horovods_wheel_is_built_once(tmp_path: Path) -> None:
    first = _horovod_wheel(sys.executable, tmp_path)
    assert first.returncode == 1
    assert "missing: no-such-compiler" in first.stderr
    wheels = tmp_path / "bytesched" / "wheels"
    [lock] = wheels.iterdir()
    kept = wheels / lock.name.removesuffix(".lock") / "horovod.whl"
    kept.parent.mkdir()
    kept.touch()
    second = _horovod_wheel(sys.executable, tmp_path)
    assert (second.returncode, second.stdout) == (0, f"{kept}\n")


def test_mxnets_environment_is_only_looked_for_if_asked_so(tmp_path: Path) -> None:
    run = subprocess.run(
        [ROOT / "scripts" / "mxnet-venv", "--find", sys.executable],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert "there is no MXNet for cp" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_horovods_wheel_needs_a_torch_to_build_against(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    run = _horovod_wheel(bare, tmp_path)
    assert run.returncode == 1
    assert run.stderr == f"horovod-wheel: {bare} has no torch to build against\n"
