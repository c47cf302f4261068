"""A script that is to be tuned and has nothing to tune hears so after a few steps."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from warm_python import warm_python

from bytesched.environment import child_environment
from bytesched.plugins import left, registry
from bytesched.run.untuned import PATIENCE_STEPS, watch_steps

TRAIN = f"""
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
for _ in range({PATIENCE_STEPS}):
    optimizer.step()
print("trained")
"""


@pytest.fixture
def step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Makes a step of an optimizer; what was said so far."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizers = sys.modules["torch.optim.optimizer"]
    # Those of this test end with it.
    monkeypatch.setattr(optimizers, "_global_optimizer_post_hooks", OrderedDict())
    watch_steps(optimizers)
    # Hooks of others come after it.
    register_optimizer_step_post_hook(lambda *_: None)

    def stepped() -> list[str]:
        optimizer.step()
        return caplog.messages

    return stepped


def test_it_is_said_once_and_why(
    step: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where a DDP has been made.
    importlib.import_module("bytesched.plugins.script.watched")
    said = {("DistributedDataParallel of Net", "there is one rank"): None}
    monkeypatch.setattr(left, "_left", said)
    for _ in range(PATIENCE_STEPS - 1):
        assert step() == []
    for _ in range(2 * PATIENCE_STEPS):
        (line,) = step()
    assert f"after {PATIENCE_STEPS} steps of SGD, DistributedDataParallel of Net: there" in line


def test_nothing_is_said_of_a_script_that_is_tuned(
    step: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step()
    with monkeypatch.context() as wrapped:
        wrapped.setattr(registry, "sessions", lambda: [object()])
        step()
    for _ in range(2 * PATIENCE_STEPS):
        assert step() == []


@pytest.mark.parametrize("tune", ["1", "0"])
def test_a_script_of_ones_own_is_told(tune: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [warm_python(), "-m", "bytesched", "run", "train.py"],
        cwd=tmp_path,
        env=child_environment({"BYTESCHED_TUNE": tune}),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert ("nothing is tuned: after" in done.stderr) == (tune == "1")
    assert ("neither a DistributedDataParallel nor" in done.stderr) == (tune == "1")
