"""A clean environment for every test: no bytesched setting, no launcher, the logger as imported."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Iterator

import pytest

LAUNCHER_PREFIXES = ("BYTESCHED_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)

pytest_plugins = ["rank_pools"]

faulthandler.enable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in its background; the processes of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES:
            monkeypatch.delenv(name)
    logger = logging.getLogger("bytesched")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
