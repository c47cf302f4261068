"""An interpreter that has torch imported when it starts: for tests that start many."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from rank_worker import Launch
from ranks import fork_server

START_S = 60.0


@cache
def warm_python(*modules: str) -> str:
    """Path of a `python` that is forked from one that has imported torch, and `modules`.

    It behaves as the interpreter of the tests, and so do those that are started with its
    `sys.executable`; on an emulated host of a user who is not root, or with options of the
    interpreter, it is that one.
    What a library reads from the environment when it is imported, it has read before: Horovod the
    settings of its autotuner.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = fork_server(*modules)
    pid = server.start(
        Launch(
            output=str(folder / "server"),
            case=(str(Path(__file__).with_name("warm_server.py")), "serve_programs"),
            args=(str(folder),),
        )
    )
    for beside in Path(sys.executable).parent.iterdir():
        if not beside.name.startswith("python"):
            (folder / beside.name).symlink_to(beside)
    program, deadline_s = folder / "python", time.monotonic() + START_S
    while not program.exists():
        assert server.poll(pid) is None, (folder / "server.err").read_text()
        assert time.monotonic() < deadline_s, f"no interpreter within {START_S:g} s"
        time.sleep(0.05)
    return str(program)
