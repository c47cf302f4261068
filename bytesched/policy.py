"""Policies: which ready task goes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bytesched.errors import ConfigError
from bytesched.task import CommTask
from bytesched.values import shown

__all__ = [
    "Fifo",
    "Policy",
    "Priority",
    "Prophet",
    "named_policy",
    "policy_names",
    "register_policy",
]


class Policy(Protocol):
    """Gives every ready task a key; the smallest key goes first, ties in order of readiness."""

    def key(self, task: CommTask) -> float:
        """The key of ``task``, asked once when it becomes ready."""


class Priority:
    """Front layers first: Jackson's rule, optimal for preemptive sends (ByteScheduler, sec. 3)."""

    def key(self, task: CommTask) -> float:
        return task.priority


class Prophet(Priority):
    """Front layers first, and several in a row where nothing more urgent can come meanwhile.

    How many, says `bytesched.admission.Foreseen` where an order is planned; elsewhere it is
    `Priority`.
    """


class Fifo:
    """In order of readiness, as DDP and Horovod do."""

    def key(self, task: CommTask) -> float:
        return 0


_POLICIES: dict[str, Callable[[], Policy]] = {
    "priority": Priority,
    "fifo": Fifo,
    "prophet": Prophet,
}


def register_policy(name: str, policy: Callable[[], Policy]) -> None:
    """Makes ``policy`` available as ``Config(policy=name)``."""
    if _POLICIES.get(name, policy) is not policy:
        raise ConfigError(f"policy {name!r} is registered already, as {_POLICIES[name]!r}")
    _POLICIES[name] = policy


def policy_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_POLICIES)


def named_policy(name: str, origin: str = "") -> Policy:
    """A new policy of that name; ConfigError if there is none.

    Args:
        origin: where the name stood, if that is known.
    """
    try:
        return _POLICIES[name]()
    except KeyError:
        where = f" ({origin})" if origin else ""
        raise ConfigError(
            f"no policy {shown(name)}{where}; there are {', '.join(policy_names())}"
        ) from None
