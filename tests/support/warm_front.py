#!PYTHON -IS
"""Stands in for `python`: has the server beside it fork an interpreter, and ends as that does."""

import contextlib
import marshal
import os
import resource
import signal
import socket
import sys

REAL = "PYTHON"
#: what an emulated host has of its own, for a process of root
NAMESPACES = ("net", "uts")
#: those of the server, and of its user
THEIRS = ["THEIRS"]
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2", "SIGCONT")
SIZE_BYTES = 8

arguments = sys.argv[1:]
run, flags = list(arguments), []
# Whether it writes bytecode makes no difference.
while run and run[0] in ("-u", "-B"):
    flags.append(run.pop(0))
is_unbuffered = "-u" in flags
runs_a_program = bool(run) and (run[0] in ("-m", "-c") or not run[0].startswith("-"))
ours = [os.readlink(f"/proc/self/ns/{kind}") for kind in (*NAMESPACES, "user")]
# Nobody leaves a user's namespace for that of a host in another one.
if not runs_a_program or ours[-1] != THEIRS[-1]:
    os.execv(REAL, [REAL, *arguments])

pid = 0
waiting: list[int] = []


def forward(number: int, frame: object) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    else:
        waiting.append(number)


for name in FORWARDED:
    if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
        signal.signal(getattr(signal, name), forward)
numbers = [int(fd) for fd in os.listdir("/proc/self/fd")]
numbers = [fd for fd in numbers if os.path.exists(f"/proc/self/fd/{fd}")]
entered = [
    os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
    for kind, own, theirs in zip(NAMESPACES, ours, THEIRS, strict=False)
    if own != theirs
]
umask = os.umask(0)
request = marshal.dumps(
    {
        "arguments": run,
        "is_unbuffered": is_unbuffered,
        "numbers": numbers,
        "folder": os.getcwd(),
        "umask": umask,
        "environment": dict(os.environ),
        "core_limit": resource.getrlimit(resource.RLIMIT_CORE),
        "cores": list(os.sched_getaffinity(0)),
    }
)
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join(os.path.dirname(sys.argv[0]), "calls"))
    socket.send_fds(server, [len(request).to_bytes(SIZE_BYTES, "little")], numbers + entered)
    server.sendall(request)
    pid = int.from_bytes(server.recv(SIZE_BYTES), "little")
    for number in waiting:
        forward(number, None)
    answer = server.recv(SIZE_BYTES)
if not answer:
    sys.exit("the server of this interpreter has ended")
code = os.waitstatus_to_exitcode(int.from_bytes(answer, "little"))
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
