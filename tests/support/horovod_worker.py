"""A Horovod rank of a test: `python horovod_worker.py LAUNCH`, started by a Horovod launcher.

LAUNCH is a file with a `rank_worker.Launch`, whose case the rank runs, and ends as a script would.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from rank_worker import Launch, load, resolve

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    launch: Launch = load(Path(sys.argv[1]).read_bytes())
    sys.path[:] = launch.import_path
    torch.set_num_threads(1)
    hvd.init()
    resolve(launch.case)(*launch.args)
