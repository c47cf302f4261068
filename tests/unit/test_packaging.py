"""The build table, the two links, the version, what scripts and workflows do, what is tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT
from tiers import is_tried

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


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "release --check v0.0.1",
            f"the tag is v0.0.1, and bytesched/version.py says {bytesched.__version__}\n",
        ),
        ("find-python 3.99", "found no Python 3.99 or newer"),
        # Looked for, and not built.
        (f"mxnet-venv --find {sys.executable}", "there is no MXNet for cp"),
        (f"trainers-venv --find {sys.executable}", "there are no trainers for"),
    ],
)
def test_what_is_not_there_is_told(command: str, told: str, tmp_path: Path) -> None:
    run = _script(*command.split(), XDG_CACHE_HOME=str(tmp_path), PYTHON=sys.executable)
    assert (run.returncode, run.stdout) == (1, "")
    assert told in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_python_is_found_that_is_new_enough() -> None:
    assert _script("find-python", "3.10", PYTHON=sys.executable).stdout == f"{sys.executable}\n"


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


def test_horovods_wheel_needs_a_torch_to_build_against(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    run = _script("horovod-wheel", str(bare), XDG_CACHE_HOME=str(tmp_path))
    assert run.returncode == 1
    assert run.stderr == f"horovod-wheel: {bare} has no torch to build against\n"


SCRIPT = re.compile(r"\./(scripts/[\w.-]+|\.ci/[\w.-]+|\.github/[\w./-]+)")
#: a major version, which its owner moves on, or a file of this repository
PINNED = re.compile(r"[\w-]+/[\w-]+@(release/)?v\d+|\./\.github/workflows/\w+\.yml")


def _all(folder: str) -> list[dict[str, Any]]:
    return [
        yaml.safe_load(p.read_text()) for p in sorted((ROOT / ".github" / folder).glob("*.yml"))
    ]


def test_workflows_call_what_is_there() -> None:
    # Jobs, too, may call another workflow.
    jobs = [job for workflow in _all("workflows") for job in workflow["jobs"].values()]
    steps = jobs + [step for job in jobs for step in job.get("steps", [])]
    used = [step["uses"] for step in steps if "uses" in step]
    called = SCRIPT.findall("\n".join([*used, *(step["run"] for step in steps if "run" in step)]))
    assert ".ci/run" in called
    for script in called:
        assert os.access(ROOT / script, os.R_OK if script.startswith(".github") else os.X_OK), (
            script
        )
    assert [action for action in used if not PINNED.fullmatch(action)] == []


def test_forms_ask_something() -> None:
    for form in _all("ISSUE_TEMPLATE"):
        assert {"name", "description", "body"} <= form.keys()
        assert len({field["id"] for field in form["body"]}) == len(form["body"])
        assert {field["type"] for field in form["body"]} <= {"dropdown", "input", "textarea"}
        assert all(field["attributes"]["label"] for field in form["body"])


def test_hooks_are_the_tools_of_the_check() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].split(" --")[0] for hook in repository["hooks"]]
    check = (ROOT / "scripts" / "check").read_text()
    assert entries == [".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"]
    assert all(f"\n{entry}" in check for entry in entries)


@pytest.mark.parametrize("ways", [2, 3, 4, 6])
def test_each_value_of_each_parameter_is_tried(ways: int) -> None:
    scripts = 12
    tried = [
        divmod(number, ways)
        for number in range(scripts * ways)
        if is_tried(number, [ways, scripts], ways)
    ]
    # Each script once, and each way as often.
    assert [script for script, _ in tried] == list(range(scripts))
    assert sorted(way for _, way in tried) == sorted([*range(ways)] * (scripts // ways))
