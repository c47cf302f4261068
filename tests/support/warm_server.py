"""What stands behind `warm_python`: forks an interpreter for each call of the program."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import marshal
import multiprocessing
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rank_worker import IMPORT_PATH

FRONT = Path(__file__).with_name("warm_front.py")
#: descriptors of the program begin above those that it passes on
HIGH = 500
SIZE_BYTES = 8
PR_SET_PDEATHSIG = 1


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork an interpreter for each caller; returns in each what it is to run."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    callers: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                caller, _ = listener.accept()
                request, descriptors = received(caller)
                pid = os.fork()
                if pid == 0:
                    # What is still open when it is collected would close another file's number.
                    selector.close()
                    for connection in (caller, *callers):
                        connection.close()
                    return request | {"descriptors": descriptors}
                for descriptor in descriptors:
                    os.close(descriptor)
                caller.sendall(pid.to_bytes(SIZE_BYTES, "little"))
                callers[caller] = pid
                selector.register(caller, selectors.EVENT_READ)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, caller)
            elif isinstance(key.fileobj, int):
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                caller = key.data
                _, status = os.waitpid(callers.pop(caller), 0)
                with contextlib.suppress(OSError):
                    caller.sendall(status.to_bytes(SIZE_BYTES, "little"))
                with contextlib.suppress(KeyError):
                    selector.unregister(caller)
                caller.close()
            elif key.fileobj in callers:
                # Its caller is gone, and so must it be.
                selector.unregister(key.fileobj)
                os.kill(callers[key.fileobj], signal.SIGKILL)


def received(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What a caller asks for, and its open files."""
    head, descriptors, _, _ = socket.recv_fds(caller, SIZE_BYTES, HIGH)
    size, text = int.from_bytes(head, "little"), b""
    while len(text) < size:
        text += caller.recv(size - len(text))
    return marshal.loads(text), list(descriptors)


def become(request: dict[str, Any], executable: str, import_path: list[str]) -> None:
    """Take over the caller's files, folder, environment and limits."""
    # This process ends with the server.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptors = request["descriptors"]
    for namespace in descriptors[len(request["numbers"]) :]:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "this process cannot enter its caller's host")
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in descriptors[: len(request["numbers"])]]
    os.closerange(0, HIGH)
    for own, number in zip(kept, request["numbers"], strict=True):
        os.dup2(own, number)
        os.close(own)
    # It ends as soon as Python has ended: the libraries would take a quarter of a second.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    resource.setrlimit(resource.RLIMIT_CORE, request["core_limit"])
    os.sched_setaffinity(0, request["cores"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["is_unbuffered"] or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.executable = executable
    multiprocessing.set_executable(executable)
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*map(os.path.abspath, named), *import_path]
    importlib.invalidate_caches()
    for name in tuple(sys.modules):
        if name.partition(".")[0] == "bytesched":
            del sys.modules[name]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    with contextlib.suppress(ImportError):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def run(arguments: list[str]) -> None:
    """As the interpreter does with its command line."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    what, *rest = arguments
    if what == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif what == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(what).resolve().parent))
        sys.argv[:] = arguments
        vars(main).update(__file__=what, __builtins__=__builtins__)
        exec(compile(Path(what).read_bytes(), what, "exec"), vars(main))


def serve_programs(folder: str) -> None:
    """Put the program into the folder and serve it; runs what was asked for in each new process."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    import_path = [entry for entry in IMPORT_PATH if entry not in named]
    importlib.import_module("torch.distributed.run")
    gc.freeze()
    # A terminal interrupts all, and this one has nothing to interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    executable, hidden = Path(folder, "python"), Path(folder, "new")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(folder, "calls")))
        listener.listen(64)
        front = FRONT.read_text().replace("PYTHON", sys.executable)
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "user")]
        hidden.write_text(front.replace('["THEIRS"]', repr(spaces)))
        hidden.chmod(0o755)
        hidden.rename(executable)
        request = serve(listener)
    become(request, str(executable), import_path)
    run(request["arguments"])
