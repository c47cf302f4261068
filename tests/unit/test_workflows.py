"""What runs elsewhere parses: workflows, templates, hooks; and what they call is there."""

from __future__ import annotations

import os
import re
from typing import Any

import yaml
from paths import ROOT

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
