"""The build table, the two links, and the one place where the version stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from public import NEEDS, PUBLIC

import bytesched
from bytesched.doctor.checks import OPTIONAL

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", ["plugins", "tuning"])
def test_link_points_home(name: str) -> None:
    link = ROOT / "bytesched" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


def _run(*command: Path | str, **options: Any) -> None:
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, **options
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is installed from the wheel of this tree, and from the one of its source archive."""
    folder = tmp_path_factory.mktemp("built")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    _run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    [source] = folder.glob("*.tar.gz")
    again = folder / "again"
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", again, source)
    installed = {}
    for name, wheel in (("wheel", next(folder.glob("*.whl"))), ("sdist", next(again.glob("*")))):
        installed[name] = folder / name
        _run(*pip, "install", "--no-deps", "--target", installed[name], wheel)
    return installed


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_every_file_is_installed(built: dict[str, Path], kind: str) -> None:
    homes = {"bytesched": "bytesched", "plugins": "bytesched/plugins", "tuning": "bytesched/tuning"}
    wanted = {
        f"{home}/{path.relative_to(ROOT / folder)}"
        for folder, home in homes.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    found = {
        str(path.relative_to(built[kind]))
        for path in (built[kind] / "bytesched").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert found == wanted


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_links_of_the_readme_lead_somewhere_from_an_index(
    built: dict[str, Path], kind: str
) -> None:
    [metadata] = built[kind].glob("bytesched-*.dist-info/METADATA")
    text = metadata.read_text()
    place = f"bytesched/bytesched/blob/v{bytesched.__version__}/docs/how-to/ddp.md"
    assert f"](https://github.com/{place})" in text
    assert [target for target in LINK.findall(text) if not target.startswith("https://")] == []


#: Imports the public names of each module in a process of its own, with torch there already.
IMPORTS = """
import gc, json, os, sys, traceback
import torch
gc.freeze()
for module, names in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        namespace = {}
        try:
            exec(f"import bytesched\\nfrom {module} import {', '.join(names)}", namespace)
            print(module, namespace["bytesched"].__file__, flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
"""


Imported = Callable[[str, str], tuple[dict[str, str], str]]


@pytest.fixture(scope="module")
def imported(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """By kind and extra: the file of `bytesched` by module that has all its names, and errors."""

    @cache
    def modules_of(kind: str, extra: str) -> tuple[dict[str, str], str]:
        names = {module: PUBLIC[module] for module in PUBLIC if NEEDS.get(module, "") == extra}
        run = subprocess.run(
            [sys.executable, "-c", IMPORTS, json.dumps(names)],
            cwd=tmp_path_factory.mktemp("elsewhere"),
            env={**os.environ, "PYTHONPATH": str(built[kind])},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        return dict(line.split() for line in run.stdout.splitlines()), run.stderr

    return modules_of


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.needs("horovod")] * ("horovod" in module))
        for module in PUBLIC
    ],
)
def test_public_names_are_there_once_installed(
    imported: Imported, built: dict[str, Path], kind: str, module: str
) -> None:
    extra = NEEDS.get(module, "")
    if extra:
        pytest.importorskip(extra)
    files, errors = imported(kind, extra)
    assert module in files, errors
    assert Path(files[module]).is_relative_to(built[kind])


def test_core_depends_on_nothing(project: dict[str, Any]) -> None:
    needed = [line for line in project["project"]["dependencies"] if "python_version" not in line]
    assert needed == []


USED = ("torch", "horovod", "mpi", "tune", "report", "pipeline")


def test_extras_are_complete_and_the_doctor_knows_them(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {*USED, "test", "dev", "docs"}
    for package, extra in OPTIONAL.items():
        assert any(line.startswith(package) for line in extras[extra]), package


def test_version_stands_in_one_place(project: dict[str, Any]) -> None:
    assert "version" in project["project"]["dynamic"]
    assert bytesched.__version__.count(".") == 2


def _release(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "release", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_changelog_has_notes_for_the_version() -> None:
    run = _release("--notes", f"v{bytesched.__version__}")
    assert run.returncode == 0, run.stderr
    assert "\n- " in run.stdout
    assert "\n## " not in f"\n{run.stdout}"


def test_tag_of_another_version_is_refused() -> None:
    run = _release("--check", "v0.0.1")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"release: the tag is v0.0.1, and bytesched/version.py says {bytesched.__version__}\n"
    )


def test_every_python_script_is_type_checked(project: dict[str, Any]) -> None:
    scripts = {
        f"scripts/{path.name}"
        for path in (ROOT / "scripts").iterdir()
        if path.is_file()
        and (path.suffix == ".py" or "python" in path.read_text().partition("\n")[0])
    }
    assert scripts <= set(project["tool"]["mypy"]["files"])


@pytest.mark.parametrize("name", ["plugins", "tuning"])
def test_second_copy_of_a_package_is_refused(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
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
        "scripts/docs",
        "scripts/coverage",
        "scripts/release",
        "scripts/find-python",
        "scripts/horovod-wheel",
        "scripts/mxnet-venv",
        "scripts/trainers-venv",
        ".ci/run",
    ],
)
def test_script_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=250)
    assert "set -euo pipefail" in path.read_text()


def test_a_python_is_looked_for_that_is_new_enough() -> None:
    def found(*least: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "scripts" / "find-python"), *least]
        environment = {**os.environ, "PYTHON": sys.executable}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert found().stdout == found("3.10").stdout == f"{sys.executable}\n"
    too_new = found("3.99")
    assert too_new.returncode == 1
    assert "found no Python 3.99 or newer" in too_new.stderr


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
        timeout=250,
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
        timeout=250,
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


@pytest.mark.parametrize(
    ("script", "missing"),
    [("mxnet-venv", "there is no MXNet for cp"), ("trainers-venv", "there are no trainers for")],
)
def test_an_environment_is_only_looked_for_if_asked_so(
    script: str, missing: str, tmp_path: Path
) -> None:
    run = subprocess.run(
        [ROOT / "scripts" / script, "--find", sys.executable],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert missing in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_horovods_wheel_needs_a_torch_to_build_against(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    run = _horovod_wheel(bare, tmp_path)
    assert run.returncode == 1
    assert run.stderr == f"horovod-wheel: {bare} has no torch to build against\n"
