"""A queue of processes on one machine: who stands in front has the turn, and death leaves it.

A place in the queue is a named pipe in a folder, which its process holds open for reading, and
whose name begins with a number. A process that waits opens the pipe of the one before it for
writing and polls: the kernel tells it, without a look in between and with a limit of time, when
the last reader is gone, by `Ticket.give_back` or with its process. A pipe that nobody reads is a
place that somebody died in.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from bytesched.environment import rank_view
from bytesched.errors import PluginError
from bytesched.files import locked

#: of a number, so that names are in the order of numbers
_DIGITS: Final = 12
#: held while a number is drawn, which takes microseconds
_DOOR: Final = "door"
_DOOR_TIMEOUT_S: Final = 10.0
#: characters of a command in a message
_MOST_SHOWN: Final = 120


class Tickets:
    """One queue.

    Args:
        folder: where it is; made if it is not there, for this user alone.
        label: what this process is called in messages of others, in a word or two.

    Raises `PluginError` if the folder is another user's, and `OSError` if it cannot be made.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self._folder = folder
        self._label = re.sub(r"[^\w .:-]", "_", label)
        _make_private(folder)

    def draw(self) -> Ticket:
        """The last place. Raises `OSError` if the folder cannot be written."""
        try:
            return self._drawn()
        except FileNotFoundError:
            # Whoever tidies up has removed the folder.
            _make_private(self._folder)
            return self._drawn()

    def _drawn(self) -> Ticket:
        door = self._folder / _DOOR
        with locked(door, _DOOR_TIMEOUT_S):
            ahead = self.standing()
            number = int(ahead[-1][:_DIGITS]) + 1 if ahead else 1
            name = f"{number:0{_DIGITS}d}-{os.getpid()}-{self._label}"
            path = self.path(name)
            os.mkfifo(path, 0o600)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return Ticket(self, name, reader, ahead)

    def standing(self) -> list[str]:
        """The names of the places in their order, with those that nobody stands in any more."""
        return sorted(name for name in os.listdir(self._folder) if name != _DOOR)

    def path(self, name: str) -> str:
        """Where a place is."""
        return f"{self._folder}/{name}"

    def __repr__(self) -> str:
        return f"<Tickets {str(self._folder)!r}, {len(self.standing())} standing>"


class Ticket:
    """A place in the queue, from its drawing to `give_back`."""

    def __init__(self, tickets: Tickets, name: str, reader: int, ahead: list[str]) -> None:
        self._tickets = tickets
        self._name = name
        self._reader = reader
        #: the places that were before this one when it was last looked, in their order
        self._ahead = ahead

    def wait(self, timeout_s: float) -> bool:
        """Whether this place is the front, or becomes it within that time."""
        until_s = time.monotonic() + timeout_s
        while (ahead := self._next_ahead()) is not None:
            try:
                poll = select.poll()
                poll.register(ahead, 0)
                left_s = until_s - time.monotonic()
                # Rounded up: in the last millisecond it would look again and again.
                if not poll.poll(max(0, int(1000 * left_s) + 1)):
                    return False
            finally:
                os.close(ahead)
        return True

    def _next_ahead(self) -> int | None:
        """What to poll of the next one before this place; None if there is none."""
        while self._ahead:
            # No place comes before one that is there: whoever is left here was here before.
            path = self._tickets.path(self._ahead[-1])
            try:
                return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    # It died there.
                    with suppress(FileNotFoundError):
                        os.unlink(path)
                elif error.errno != errno.ENOENT:
                    raise
            self._ahead.pop()
        return None

    @property
    def front(self) -> str:
        """Who has the turn, in words; empty if nobody is before this place."""
        first = self._tickets.standing()[0]
        if first >= self._name:
            return ""
        _, pid, label = first.split("-", 2)
        return f"{label}, process {pid}{_command(int(pid))}"

    def give_back(self) -> None:
        """Leaves the queue. Idempotent."""
        if self._reader >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self._tickets.path(self._name))
            self.forget()

    def forget(self) -> None:
        """In a forked child: the place is the parent's alone."""
        reader, self._reader = self._reader, -1
        if reader >= 0:
            os.close(reader)

    def __repr__(self) -> str:
        state = "given back" if self._reader < 0 else "standing"
        return f"<Ticket {self._name}, {state}>"


def _make_private(folder: Path) -> None:
    """Makes a folder of this user alone, if it is not there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PluginError(
            f"{folder}, where jobs that share a device meet, belongs to user {found.st_uid} with "
            f"mode {stat.S_IMODE(found.st_mode):o}: it has to be this user's, {os.getuid()}, and "
            "nobody else may write there. Remove it, or name another folder: share='/folder'"
        )


def _command(pid: int) -> str:
    """What a process of this machine was started as; nothing if that cannot be seen."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    text = b" ".join(arguments).decode(errors="replace")
    return f" ({text[:_MOST_SHOWN]})" if text else ""


_NAME: Final = re.compile(r"[\w.-]{1,80}")
#: in memory, the same for every process of a user, whatever its environment says
_IN_MEMORY: Final = Path("/dev/shm")
#: else; made for this user alone, and refused if it is another one's
_ON_DISK: Final = Path("/tmp")


def parse_share(value: object) -> str:
    """Return a name under which jobs share devices, a folder for that, or nothing."""
    text = value.strip() if isinstance(value, str) else None
    if text is None or (text and not os.path.isabs(text) and not _NAME.fullmatch(text)):
        raise ValueError("neither a name of letters, digits, '.', '_' and '-', nor a whole path")
    return text


def device_folder(share: str, device: str) -> Path:
    """The folder in which jobs queue for ``device``, what is the same for all that share it."""
    if os.path.isabs(share):
        return Path(share, device)
    shared = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else _ON_DISK
    return shared / f"bytesched-{os.getuid()}" / share / device


def processor(rank: int) -> str:
    """The processors of this rank: ranks of other jobs with its number on this host share them."""
    view = rank_view()
    is_known = view.launcher != "none" and view.local_rank >= 0
    return f"{socket.gethostname()}-cpu{view.local_rank if is_known else rank}"
