"""The build table, the two links, the one place where the version stands, and what scripts do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import bytesched
from bytesched.doctor.checks import OPTIONAL
from hatch_build import absolute

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LINKED = ("plugins", "tuning")
USED = ("torch", "horovod", "mpi", "tune", "report", "pipeline")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _run(*command: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def _script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run(ROOT / "scripts" / name, *arguments, **environment)


def test_links_point_home() -> None:
    assert [os.readlink(ROOT / "bytesched" / name) for name in LINKED] == [
        "../plugins",
        "../tuning",
    ]


def test_second_copy_of_a_package_is_refused() -> None:
    for name in LINKED:
        run = _run(sys.executable, "-c", f"import {name}")
        assert run.returncode == 1
        assert f"bytesched.{name}" in run.stderr.splitlines()[-1]


def test_links_of_the_readme_lead_into_the_repository_at_its_tag() -> None:
    text = absolute("[a](docs/a.md#b) ![c](c.svg) [d](https://d) [e](#e)", "v1")
    page = "https://github.com/bytesched/bytesched/blob/v1/docs/a.md#b"
    image = "https://raw.githubusercontent.com/bytesched/bytesched/v1/c.svg"
    assert text == f"[a]({page}) ![c]({image}) [d](https://d) [e](#e)"


def test_core_depends_on_nothing(project: dict[str, Any]) -> None:
    needed = [line for line in project["project"]["dependencies"] if "python_version" not in line]
    assert needed == []


def test_extras_are_complete_and_the_doctor_knows_them(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {*USED, "test", "dev", "docs"}
    for package, extra in OPTIONAL.items():
        assert any(line.startswith(package) for line in extras[extra]), package


def test_every_python_script_is_type_checked(project: dict[str, Any]) -> None:
    scripts = {
        f"scripts/{path.name}"
        for path in (ROOT / "scripts").iterdir()
        if path.is_file() and (path.suffix == ".py" or "python" in path.read_text().split("\n")[0])
    }
    assert scripts <= set(project["tool"]["mypy"]["files"])


def test_changelog_has_notes_for_the_version() -> None:
    run = _script("release", "--notes", f"v{bytesched.__version__}")
    assert run.returncode == 0, run.stderr
    assert "\n- " in run.stdout
    assert "\n## " not in f"\n{run.stdout}"


def test_tag_of_another_version_is_refused() -> None:
    run = _script("release", "--check", "v0.0.1")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"release: the tag is v0.0.1, and bytesched/version.py says {bytesched.__version__}\n"
    )


def test_a_python_is_looked_for_that_is_new_enough() -> None:
    found = _script("find-python", "3.10", PYTHON=sys.executable)
    assert found.stdout == f"{sys.executable}\n"
    too_new = _script("find-python", "3.99", PYTHON=sys.executable)
    assert too_new.returncode == 1
    assert "found no Python 3.99 or newer" in too_new.stderr


def test_horovods_compiler_gets_another_standard_and_run_path(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    compiler.chmod(0o755)
    flags = ["-std=c++14", "-std=gnu++11", "-std=c11", "-Wl,-rpath,/build/lib:/x", "a b", "*"]
    run = _script("horovod-cxx", *flags, HOROVOD_CXX=str(compiler))
    run_path = "-Wl,-rpath,$ORIGIN/../../../..:$ORIGIN/../../torch/lib"
    assert run.stdout.split("|") == ["-std=gnu++20"] * 2 + ["-std=c11", run_path, "a b", "*", ""]


def test_horovods_wheel_is_built_once(tmp_path: Path) -> None:
    settings = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    first = _script("horovod-wheel", sys.executable, **settings)
    assert first.returncode == 1
    assert "missing: no-such-compiler" in first.stderr
    wheels = tmp_path / "bytesched" / "wheels"
    [lock] = wheels.iterdir()
    kept = wheels / lock.name.removesuffix(".lock") / "horovod.whl"
    kept.parent.mkdir()
    kept.touch()
    second = _script("horovod-wheel", sys.executable, **settings)
    assert (second.returncode, second.stdout) == (0, f"{kept}\n")


@pytest.mark.parametrize(
    ("script", "missing"),
    [("mxnet-venv", "there is no MXNet for cp"), ("trainers-venv", "there are no trainers for")],
)
def test_an_environment_is_only_looked_for_if_asked_so(
    script: str, missing: str, tmp_path: Path
) -> None:
    run = _script(script, "--find", sys.executable, XDG_CACHE_HOME=str(tmp_path))
    assert (run.returncode, run.stdout) == (1, "")
    assert missing in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_horovods_wheel_needs_a_torch_to_build_against(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    run = _script("horovod-wheel", str(bare), XDG_CACHE_HOME=str(tmp_path))
    assert run.returncode == 1
    assert run.stderr == f"horovod-wheel: {bare} has no torch to build against\n"
