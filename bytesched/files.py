"""Files that are written in one piece: a name shows the old content or the new, never a part."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["locked", "read_text", "replacing", "write_text"]

_LOOKS_EVERY_S = 0.0002

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield an empty file that takes the place of ``path`` if the block ends without an error.

    It keeps the mode of the file that it replaces. A link is replaced, not followed.

    Args:
        durable: the content is on the disk before the name shows it.

    Raises ``OSError`` if the folder cannot be written, or ``path`` is no regular file.
    """
    found = _mode(path)
    if found is not None and not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # A new name and exclusive: whatever waits under a name that can be foreseen stays as it is.
    scratch = path.with_name(f".{path.name}.{os.urandom(8).hex()}.new")
    descriptor = os.open(scratch, _NEW, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            if found is not None:
                os.fchmod(descriptor, stat.S_IMODE(found))
            yield file
            file.flush()
            if durable:
                os.fsync(descriptor)
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file in one piece (see ``replacing``); into a pipe or device as it is.

    Raises ``OSError`` if it cannot be written.
    """
    found = _mode(path)
    if found is not None and (stat.S_ISCHR(found) or stat.S_ISFIFO(found)):
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path, durable=durable) as file:
        file.write(text.encode())


def read_text(path: Path) -> str:
    """Return the text of a file, at once: a pipe with nothing in it would be waited for.

    Raises ``ValueError`` if it is no regular file or not UTF-8, ``OSError`` if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return file.read().decode()


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds the file ``path``, which stays behind, empty: one process or thread at a time does.

    Raises ``TimeoutError`` if another one does not let go, ``OSError`` if it cannot be opened, as
    a link cannot.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        deadline_s = time.monotonic() + timeout_s
        while not _is_taken(descriptor):
            if time.monotonic() > deadline_s:
                raise TimeoutError(errno.ETIMEDOUT, f"held for {timeout_s:g} s", str(path))
            time.sleep(_LOOKS_EVERY_S)
        yield
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
