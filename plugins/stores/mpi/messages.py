"""The short messages between workers and servers, the tags of all messages, and their memory."""

from __future__ import annotations

import io
import json
from enum import IntEnum, auto
from typing import Any, NamedTuple

import torch

from bytesched import errors
from bytesched.errors import BytesschedError, PeerLost, PluginError

TO_SERVER = 1
TO_WORKER = 2
_FIRST_DATA_TAG = 16

LONGEST_BYTES = 16384
#: of a text; JSON has up to six bytes for a character
_LONGEST_TEXT = 2500


class Op(IntEnum):
    """What a message is about."""

    # to a server
    MEET = auto()
    INIT = auto()
    DELETE = auto()
    PUSH = auto()
    PULL = auto()
    OPTIMIZER = auto()
    GET_STATE = auto()
    SET_STATE = auto()
    ALIVE = auto()
    BYE = auto()
    # to a worker
    MET = auto()
    DONE = auto()
    PUSHED = auto()
    READY = auto()
    # to both
    FAILED = auto()


class Message(NamedTuple):
    """A short message; the meaning of its entries depends on its op."""

    op: int
    key: int = -1
    step: int = 0
    nbytes: int = 0
    priority: int = 0
    offset: int = 0
    #: as JSON has it; a text may be cut
    body: Any = None

    def packed(self, source: int) -> bytes:
        """Its bytes on the wire, from rank ``source``."""
        body = self.body[:_LONGEST_TEXT] if isinstance(self.body, str) else self.body
        return json.dumps((source, *self[:-1], body)).encode() + b"\0"

    @classmethod
    def unpacked(cls, data: bytearray) -> tuple[int, Message]:
        """The source, and the message."""
        source, *entries = json.loads(data[: data.index(0)])
        return source, cls(*entries)

    @classmethod
    def failed(cls, error: BaseException) -> Message:
        """The message that reports ``error``, without the context that its text adds."""
        text = error.args[0] if error.args else ""
        return cls(Op.FAILED, body=f"{type(error).__name__}\n{text}")

    @property
    def error(self) -> BaseException:
        """The error that another rank has reported."""
        name, _, text = self.body.partition("\n")
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


def tensor_of(value: Any) -> torch.Tensor:
    """The memory of a torch tensor or a numpy array."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise PluginError(f"a value of type {type(value).__qualname__}: {error}") from None


def flat_of(value: Any) -> torch.Tensor:
    """Its elements one after another in the host's memory: its own memory, if they lie so."""
    return tensor_of(value).cpu().contiguous().reshape(-1)


def memory_of(tensor: torch.Tensor) -> Any:
    """The bytes of a flat tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def packed_state(state: dict[str, torch.Tensor]) -> memoryview:
    """The memory of a state on its way."""
    file = io.BytesIO()
    # Of a view all memory would be saved.
    torch.save({name: tensor.clone() for name, tensor in state.items()}, file)
    return file.getbuffer()


def unpacked_state(data: bytearray) -> dict[str, torch.Tensor]:
    """The entries again."""
    state: dict[str, torch.Tensor] = torch.load(io.BytesIO(data), weights_only=True)
    return state
