"""Every error that bytesched raises on purpose.

::

    BytesschedError
    ├── ConfigError              a field, variable or file says something impossible
    ├── PluginError              this use is not supported, or a framework is missing
    │   └── UnusedParameterError a parameter got no gradient and nobody said that this may happen
    ├── BackgroundError          a background step raised, or did not return
    ├── MismatchError            the ranks disagree on model, plan or configuration
    ├── SchedulerClosed          used after close
    ├── InvalidTransition        a change that the state of a task does not allow
    └── TransportError           a transfer failed
        ├── SchedulerTimeout     a transfer or a wait outlived its deadline
        └── PeerLost             another rank is gone

A message says what happened, with which values, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class BytesschedError(Exception):
    """Root of the tree above."""


class ConfigError(BytesschedError, ValueError):
    """A field, variable or file says something impossible."""


class PluginError(BytesschedError):
    """The use asked for is not supported, or what it needs is not installed."""


class UnusedParameterError(PluginError):
    """A parameter took no part in the loss, and unused parameters were not declared."""


class BackgroundError(BytesschedError):
    """A background step raised, or did not return in time; the foreground goes on without it."""


class MismatchError(BytesschedError):
    """The ranks disagree on something that must be the same everywhere."""


class SchedulerClosed(BytesschedError):
    """The scheduler was used after it had been closed."""


class InvalidTransition(BytesschedError):
    """A change that the state of a task, a gradient or an update does not allow."""


class TransportError(BytesschedError):
    """A transfer failed; carries the task, the rank that noticed, and the task's story.

    The three are shown below the message, so that a pasted traceback tells the whole case.
    """

    def __init__(
        self,
        message: str,
        *,
        task: str = "",
        rank: int | None = None,
        story: Sequence[object] = (),
    ) -> None:
        super().__init__(message)
        self.task = task
        self.rank = rank
        self.story = tuple(str(line) for line in story)

    def __str__(self) -> str:
        where = [f"task {self.task}"] if self.task else []
        if self.rank is not None:
            where.append(f"seen by rank {self.rank}")
        text = str(self.args[0])
        if where:
            text += f" ({', '.join(where)})"
        if self.story:
            text += "\n  story of the task, oldest first:"
            text += "".join(f"\n    {line}" for line in self.story)
        return text


class SchedulerTimeout(TransportError, TimeoutError):
    """A transfer or a wait outlived its deadline."""


class PeerLost(TransportError, ConnectionError):
    """Another rank is gone: its process died, or the link to it was cut.

    Where they are known, the message names the rank and its host, and ``peers`` are the ranks to
    which connections are broken: one, or several if survivors have given up before this one.
    """

    def __init__(
        self,
        message: str,
        *,
        peers: Sequence[int] = (),
        task: str = "",
        rank: int | None = None,
        story: Sequence[object] = (),
    ) -> None:
        super().__init__(message, task=task, rank=rank, story=story)
        self.peers = tuple(peers)


def in_one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says, as ranks tell each other."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
