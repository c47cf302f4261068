"""KVStore: the seam to parameter servers.

Every worker pushes its value of a key, and pulls what the store makes of all of them: their sum,
or, with an optimizer in the store, the updated value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from bytesched.errors import InvalidTransition, MismatchError

Key: TypeAlias = int | str
"""The name of a value in a store."""

Ended: TypeAlias = Callable[[BaseException | None], None]
"""Called once, from any thread, with the error that ended a push or a pull, or None."""


class KVStore(Protocol):
    """One worker's view of a store. Values are arrays with ``shape`` and ``dtype``.

    A step of a key is one push by every worker, then one pull by every worker. Priorities are
    those of MXNet: higher goes first.
    """

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    def num_workers(self) -> int:
        """How many workers push to this store."""

    def init(self, key: Key, value: Any) -> None:
        """Makes ``key``, with the value of worker 0; every worker calls it, in one order.

        MismatchError on every worker if they name different keys, shapes or dtypes.
        """

    def push(self, key: Key, value: Any, priority: int = 0) -> None:
        """Adds ``value`` to this step of ``key``; it may be overwritten afterwards.

        InvalidTransition before ``init``, and for a second push in a step.
        """

    def pull(self, key: Key, out: Any, priority: int = 0) -> None:
        """Fills ``out`` with the value of ``key``, after this worker's last push with the sum."""

    def pushpull(self, key: Key, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull into ``out``, or into ``value`` if that is None."""

    def barrier(self) -> None:
        """Returns when every worker has called it."""

    def close(self) -> None:
        """Leaves the store. Idempotent; everything else is SchedulerClosed afterwards."""


class AsyncKVStore(KVStore, Protocol):
    """A store that moves by itself: transfers are started, and report their end.

    They are carried out in the order of the calls. Buffers are the caller's until then. Where
    ``answers_by_priority`` is there and true, the store itself sends what is most urgent first:
    any number of pulls may be begun, and those that wait for other workers hold nothing up. Where
    ``num_servers`` is there, keys are spread over so many, each with a link of its own.
    """

    def start_push(self, key: Key, value: Any, ended: Ended, priority: int = 0) -> None:
        """Begins a push; it has ended when the store has taken the value over."""

    def start_pull(self, key: Key, out: Any, ended: Ended, priority: int = 0) -> None:
        """Begins a pull; it has ended when ``out`` is filled."""


def describe(value: Any) -> str:
    """Shape and dtype of an array, such as "float32 (4, 3)"."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


class Described(Protocol):
    """What a store knows of a key."""

    #: see `describe`
    what: str


EntryT = TypeVar("EntryT", bound=Described)


def known(entries: Mapping[Key, EntryT], key: Key, call: str, value: Any = None) -> EntryT:
    """The entry of ``key``, for a ``call`` with ``value``.

    Raises InvalidTransition if there is none, and MismatchError for a value of another kind.
    """
    entry = entries.get(key)
    if entry is None:
        raise InvalidTransition(f"{call} of key {key!r}, which has not been initialised")
    if value is not None and describe(value) != entry.what:
        raise MismatchError(
            f"{call} of key {key!r} with {describe(value)}; it was initialised as {entry.what}"
        )
    return entry
