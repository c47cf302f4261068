"""Several hosts on one machine: network namespaces joined by a bridge, each host's link shaped.

Every host is a network namespace with one interface, ``eth0``, whose other end sits on a bridge
in a namespace of its own. `tc tbf` shapes both ends of that cable, so a host neither sends nor
receives faster than the rate. Every host is also a UTS namespace: its host name is its address,
which therefore resolves. Nothing is visible on the machine's own network and nothing has a name
that could clash: a namespace lives exactly as long as its anchor process, an anchor reads a pipe
held by this process, and the end of that pipe, for whatever reason, ends the anchor.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from bytesched.errors import BytesschedError, ConfigError
from bytesched.lab.ports import free_port
from bytesched.values import shown

MAX_HOSTS = 64
_ANCHOR = ["sh", "-c", "echo ready; exec cat >/dev/null"]
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_BATCH_IP = ["ip", "-batch", "-"]
_BATCH_TC = ["tc", "-batch", "-"]
_SET_HOST_NAME = [
    *(sys.executable, "-I", "-S", "-c"),
    "import socket, sys; socket.sethostname(sys.argv[1])",
]
#: in which namespaces can be made: what that is called, and how they are made and entered
_NAMESPACES: tuple[tuple[str, list[str], list[str]], ...] = (
    ("namespaces made as root", [], []),
    (
        "namespaces made inside a user namespace",
        ["--user", "--map-root-user"],
        ["--user", "--preserve-credentials"],
    ),
)
_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LEAST_RATE, _MOST_RATE = 1e5, 1e14
#: A burst must hold one segment of 64 KiB with its headers; a smaller one makes tbf cut every
#: segment into packets, which costs ten times the CPU and a quarter of the bandwidth.
_MIN_BURST_BYTES = 131072
_BURST_S = 0.002
_QUEUE_S = 0.02
_PORT = 29400
_SETUP_TIMEOUT_S = 20.0


class LabError(BytesschedError):
    """The emulated network could not be built or used."""


def parse_rate(text: str) -> int:
    """Bits per second of a rate such as ``1gbit``, ``250mbit`` or ``2.5gbit/s``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?bit)(?:/s|ps)?\s*", text.lower())
    # A number of hundreds of digits is infinite.
    rate = float(found[1]) * _RATE_UNITS[found[2]] if found else 0.0
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ConfigError(
            f"rate {shown(text)}: expected a number and a unit of bits per second, from 100kbit to "
            "100000gbit, for example 1gbit or 250mbit"
        )
    return round(rate)


def die_with_parent() -> list[str]:
    """What to put before a command so that it ends with the thread that started it."""
    if shutil.which("setpriv") is None:
        return []
    dying = ["setpriv", "--pdeathsig", "KILL"]
    if os.getpid() == 1:
        return dying
    # One whose parent was quicker would get no signal: it is a child of init by then.
    return [*dying, "sh", "-c", '[ "$PPID" -ne 1 ] || exit 137; exec "$@"', "sh"]


class Lab:
    """A context manager around `hosts` emulated hosts with links of `rate`.

    Uses plain namespaces as root and an unprivileged user namespace otherwise. Where neither
    works, `shaped` is false, `reason` is why, and the hosts are this machine's loopback; with
    a rate of None they are that from the start. With `required`, there is an error instead.
    Processes of a lab end with the thread that launched them, even if that thread is killed.
    """

    def __init__(
        self, hosts: int = 2, rate: str | None = "1gbit", *, required: bool = False
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ConfigError(f"hosts {hosts}: a lab has 1 to {MAX_HOSTS} hosts")
        self.hosts = hosts
        self.rate_bits_per_s = 0 if rate is None else parse_rate(rate)
        #: Whether the hosts have links of their own; set on entry.
        self.shaped = False
        #: How the namespaces were made, or why they could not be.
        self.reason = "not started"
        #: Of each host, and the interface that they reach one another by.
        self.addresses = ["127.0.0.1"] * hosts
        self.interface = "lo"
        self._required = required
        self._enter_user: list[str] = []
        self._switch: subprocess.Popen[str] | None = None
        self._anchors: list[subprocess.Popen[str]] = []
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def namespace_pids(self) -> list[int]:
        """Process whose network namespace each host is; none without links of their own."""
        return [anchor.pid for anchor in self._anchors]

    def free_port(self) -> int:
        """A port of host 0 that nothing listens on."""
        return _PORT if self.shaped else free_port(self.addresses[0])

    def launch(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start `argv` on `host` with `env` added to this process's environment.

        The process id is that of `argv` itself, so signals reach it.
        """
        if not 0 <= host < self.hosts:
            raise LabError(f"host {host}: this lab has hosts 0 to {self.hosts - 1}")
        assignments = [f"{name}={value}" for name, value in (env or {}).items()]
        enter = self._enter(self._anchors[host]) if self.shaped else []
        process = subprocess.Popen(
            [*enter, *die_with_parent(), "env", *assignments, *argv],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill every process launched here and let the namespaces go."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()
        switch = [] if self._switch is None else [self._switch]
        for anchor in [*self._anchors, *switch]:
            anchor.kill()
            anchor.communicate()
        self._anchors.clear()
        self._switch = None
        self.shaped = False
        self.reason = "closed"

    def _build(self) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if not self.rate_bits_per_s:
            self.reason = "no rate was asked for"
        elif missing:
            self.reason = f"not installed: {', '.join(missing)}"
        else:
            reasons: dict[str, None] = {}
            for kind, unshare, self._enter_user in _NAMESPACES:
                try:
                    self._connect(["unshare", *unshare, "--net", "--uts"])
                except LabError as error:
                    self.close()
                    reasons[str(error)] = None
                else:
                    self.shaped, self.reason = True, kind
                    return
            self.reason = "; ".join(reasons)
        if self._required:
            raise LabError(f"cannot build emulated hosts on this machine: {self.reason}")

    def _connect(self, unshare: Sequence[str]) -> None:
        self._switch = switch = self._anchor(unshare)
        self._ip(switch, ["link add bridge0 type bridge", "link set bridge0 up"])
        addresses = [f"10.77.0.{host + 1}" for host in range(self.hosts)]
        for host, address in enumerate(addresses):
            anchor = self._anchor([*self._enter(switch), "unshare", "--net", "--uts"])
            self._anchors.append(anchor)
            port = f"host{host}"
            self._run(anchor, [*_SET_HOST_NAME, address])
            self._ip(
                switch,
                [
                    f"link add {port} type veth peer name eth0 netns {anchor.pid}",
                    f"link set {port} master bridge0 up",
                ],
            )
            self._ip(
                anchor,
                [f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"],
            )
            self._shape(switch, port)
            self._shape(anchor, "eth0")
        self.addresses, self.interface = addresses, "eth0"

    def _shape(self, anchor: subprocess.Popen[str], interface: str) -> None:
        bytes_per_s = self.rate_bits_per_s / 8
        burst_bytes = max(_MIN_BURST_BYTES, round(bytes_per_s * _BURST_S))
        limit_bytes = burst_bytes + max(_MIN_BURST_BYTES, round(bytes_per_s * _QUEUE_S))
        rule = f"qdisc add dev {interface} root tbf rate {self.rate_bits_per_s}bit"
        self._run(anchor, _BATCH_TC, f"{rule} burst {burst_bytes} limit {limit_bytes}\n")

    def _ip(self, anchor: subprocess.Popen[str], commands: Sequence[str]) -> None:
        self._run(anchor, _BATCH_IP, "".join(f"{command}\n" for command in commands))

    def _run(self, anchor: subprocess.Popen[str], argv: Sequence[str], text: str = "") -> None:
        done = subprocess.run(
            [*self._enter(anchor), *argv],
            input=text,
            capture_output=True,
            text=True,
            timeout=_SETUP_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise LabError(f"{argv[0]} failed: {' '.join(done.stderr.split()) or done.returncode}")

    def _enter(self, anchor: subprocess.Popen[str]) -> list[str]:
        return ["nsenter", "--target", str(anchor.pid), *self._enter_user, "--net", "--uts"]

    def _anchor(self, unshare: Sequence[str]) -> subprocess.Popen[str]:
        anchor = subprocess.Popen(
            [*unshare, *_ANCHOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert anchor.stdout is not None
        if anchor.stdout.readline() != "ready\n":
            _, message = anchor.communicate()
            raise LabError(" ".join(message.split()) or "a namespace could not be made")
        return anchor
