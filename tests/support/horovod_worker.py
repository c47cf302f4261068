"""A Horovod rank of a test: `python horovod_worker.py LAUNCH`, started by a Horovod launcher.

LAUNCH is a file with a `rank_worker.Launch`: with an address the rank serves cases until the other
side hangs up, without one it runs the one case and ends as a script would.
"""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys
from dataclasses import replace
from pathlib import Path

import horovod.torch as hvd
import torch
from rank_worker import Launch, load, resolve, serve_cases


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    launch: Launch = load(Path(sys.argv[1]).read_bytes())
    sys.path[:] = launch.import_path
    torch.set_num_threads(1)
    if launch.address:
        # What most cases import, before any case's time runs.
        importlib.import_module("torch._dynamo")
        importlib.import_module("pytest")
    hvd.init()
    if launch.address:
        serve_cases(replace(launch, rank=hvd.rank()))
    else:
        resolve(launch.case)(*launch.args)


if __name__ == "__main__":
    main()
