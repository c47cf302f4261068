"""A clean environment for every test, and which tests one process runs one after the other."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers import is_tried

LAUNCHER_PREFIXES = ("BYTESCHED_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)

HERE = Path(__file__).parent
#: each holds tests that would disturb each other, or that share what is costly to start
ONE_AFTER_THE_OTHER = tuple(
    map(Path, ("procs/horovod", "procs/mpi", "procs/mxnet", "procs/run", "lab", "gpu"))
)
#: what starts launchers or interpreters, or waits for deaths: not what every change is tried with
SLOW = tuple(
    Path("procs") / name
    for name in (
        *("bench", "burst", "doctor", "examples", "faults", "horovod", "integrations", "mpi"),
        *("mxnet", "run", "wave"),
    )
)
#: what minutes are spent on before they can run: see `builds`
NEEDS = {
    Path("unit/horovod"): "horovod",
    Path("procs/horovod"): "horovod",
    Path("procs/mxnet"): "mxnet",
    Path("procs/integrations"): "trainers",
}
#: files of single tests that any process may take
SCATTERED = tuple(
    Path("procs") / name
    for name in ("transparency/test_transparency.py", "transparency/test_rounds.py", "examples")
)

pytest_plugins = ["builds", "rank_pools"]
#: how many cases of a test were collected
SEEN = pytest.StashKey[Counter[str]]()

# Thousands of interpreters and ranks read the same sources: they are compiled once, whatever the
# environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

faulthandler.enable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in its background; the processes of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def group_of(path: Path) -> str | None:
    """What holds the tests that have to stay together with those of `path`."""
    if any(path.is_relative_to(scattered) for scattered in SCATTERED):
        return None
    return str(next((folder for folder in ONE_AFTER_THE_OTHER if folder in path.parents), path))


def pytest_itemcollected(item: pytest.Item) -> None:
    from builds import needs

    # Not when all are collected: pytest-xdist has read the groups by then.
    path = item.path.relative_to(HERE)
    for folder in NEEDS.keys() & set(path.parents):
        item.add_marker(pytest.mark.needs(NEEDS[folder]))
    if (group := group_of(path)) is not None:
        # What waits for a build shall not come as early as the others of its file.
        item.add_marker(pytest.mark.xdist_group("-".join([group, *needs(item)])))
    if (mark := item.get_closest_marker("one_in")) is not None:
        # The decorator next to the function is gone through last.
        sizes = [len(each.args[1]) for each in item.iter_markers("parametrize")][::-1]
        seen, name = item.config.stash.setdefault(SEEN, Counter()), item.nodeid.partition("[")[0]
        if not is_tried(seen[name], sizes, *mark.args):
            item.add_marker("nightly")
        seen[name] += 1
    if path.parts[0] == "procs":
        item.add_marker("procs")
    if any(folder in path.parents for folder in SLOW):
        item.add_marker("slow")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No bytesched setting, no launcher, the logger as imported."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES:
            monkeypatch.delenv(name)
    logger = logging.getLogger("bytesched")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in this thread alone, as ranks that share cores do."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
