"""The short messages between workers and servers, and the tags of all messages."""

from __future__ import annotations

import struct
from typing import NamedTuple

from bytesched import errors
from bytesched.errors import BytesschedError, PeerLost

__all__ = [
    "LONGEST_BYTES",
    "TO_SERVER",
    "TO_WORKER",
    "Message",
    "Op",
    "pull_tag",
    "push_tag",
]

TO_SERVER = 1
TO_WORKER = 2
_FIRST_DATA_TAG = 16

_HEADER = struct.Struct("<8q")
LONGEST_BYTES = 16384


class Op:
    """What a message is about."""

    # to a server
    MEET, INIT, DELETE, PUSH, PULL, OPTIMIZER, GET_STATE, SET_STATE, ALIVE, BYE = range(10)
    # to a worker
    MET, DONE, PUSHED, READY, STATE = range(10, 15)
    # to both
    FAILED = 15


class Message(NamedTuple):
    """A short message; the meaning of its numbers depends on its op."""

    op: int
    key: int = -1
    step: int = 0
    nbytes: int = 0
    priority: int = 0
    offset: int = 0
    text: str = ""

    def packed(self, source: int) -> bytes:
        """Its bytes on the wire, from rank ``source``."""
        text = self.text.encode()[: LONGEST_BYTES - _HEADER.size]
        return _HEADER.pack(*self[:6], source, len(text)) + text

    @classmethod
    def unpacked(cls, data: bytearray) -> tuple[int, Message]:
        """The source, and the message."""
        op, key, step, nbytes, priority, offset, source, length = _HEADER.unpack_from(data)
        text = data[_HEADER.size : _HEADER.size + length].decode(errors="replace")
        return source, cls(op, key, step, nbytes, priority, offset, text)

    @classmethod
    def failed(cls, error: BaseException) -> Message:
        """The message that reports ``error``, without the context that its text adds."""
        text = error.args[0] if error.args else ""
        return cls(Op.FAILED, text=f"{type(error).__name__}\n{text}")

    @property
    def error(self) -> BaseException:
        """The error that another rank has reported."""
        name, _, text = self.text.partition("\n")
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, BytesschedError):
            return kind(text)
        return PeerLost(f"{name}: {text}")


def push_tag(key: int) -> int:
    """The tag under which a worker sends values of ``key``."""
    return _FIRST_DATA_TAG + 2 * key


def pull_tag(key: int) -> int:
    """The tag under which a server sends values of ``key``."""
    return _FIRST_DATA_TAG + 2 * key + 1
