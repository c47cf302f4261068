"""What runs elsewhere parses: workflows, templates, hooks; and what they call is there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"
SCRIPT = re.compile(r"\./(scripts/[\w.-]+|\.ci/[\w.-]+|\.github/[\w./-]+)")
#: a major version, which its owner moves on, or a file of this repository
PINNED = re.compile(r"[\w-]+/[\w-]+@(release/)?v\d+|\./\.github/workflows/\w+\.yml")


def _name(path: Path) -> str:
    return path.name


def _steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """All steps, and all jobs, which may call another workflow."""
    jobs = list(workflow["jobs"].values())
    return jobs + [step for job in jobs for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_workflow_calls_what_is_there(path: Path) -> None:
    steps = _steps(yaml.safe_load(path.read_text()))
    called = [*(step["run"] for step in steps if "run" in step)]
    used = [step["uses"] for step in steps if "uses" in step]
    assert called
    for script in SCRIPT.findall("\n".join(called + used)):
        assert (ROOT / script).is_file(), script
        assert script.startswith(".github/") or os.access(ROOT / script, os.X_OK), script
    assert [action for action in used if not PINNED.fullmatch(action)] == []


@pytest.mark.parametrize("path", FORMS, ids=_name)
def test_form_asks_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    for field in form["body"]:
        assert field["type"] in {"dropdown", "input", "textarea"}
        assert field["attributes"]["label"]


def test_hooks_are_the_tools_of_the_check() -> None:
    [repository] = yaml.safe_load(HOOKS.read_text())["repos"]
    entries = [hook["entry"].split(" --")[0] for hook in repository["hooks"]]
    check = (ROOT / "scripts" / "check").read_text()
    assert entries == [".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"]
    assert all(f"\n{entry}" in check for entry in entries)
