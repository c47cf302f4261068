"""Where the messages of the logger `bytesched` go; the root logger is never touched."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator

_PREFIX = "bytesched: "

_log = logging.getLogger("bytesched")

#: this process, and the level that was set here
_rank = 0
_shown = logging.NOTSET


def show(level: str, rank: int) -> None:
    """Show messages, each as a line that begins with `bytesched:`.

    Rank 0 shows those of `level` and above, the other ranks no less than warnings, except that
    DEBUG shows everything everywhere. Another call changes level and rank, and adds nothing.

    Lines go where the script's own go to a terminal, if its handlers let them through, and to
    stderr if it has no handler at all. Its other handlers, of files for instance, and those with
    a formatter of a class of their own get every message in their own format. A level that the
    script gives the logger stays.
    """
    global _rank, _shown
    wanted: int = getattr(logging, level)
    everything = rank == 0 or wanted <= logging.DEBUG
    _rank = rank
    if _log.level in (logging.NOTSET, _shown):
        _shown = wanted if everything else max(wanted, logging.WARNING)
        _log.setLevel(_shown)
    if not isinstance(_log, _Logger):
        # Of the script's own class as well, if it has set one.
        kind = type(_log)
        of_both = type("_Logger", (_Logger, kind), {})
        _log.__class__ = _Logger if kind is logging.Logger else of_both


class _Line(logging.Formatter):
    """A line of ours, whatever the script's look like."""

    def format(self, record: logging.LogRecord) -> str:
        where = f"[rank {_rank}] " if _rank else ""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        # Of what another formatter may have left there.
        record.exc_text = None
        return f"{_PREFIX}{where}{level}{super().format(record)}"


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is stderr at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_line = _Line()
_stderr = _Stderr()
_stderr.setFormatter(_line)


class _Logger(logging.Logger):
    """Hands each record to every handler of the script's, but only once to a terminal.

    It stays enabled where `dictConfig` and `fileConfig` disable whatever they do not name, as they
    do unless they are told otherwise.
    """

    _is_disabled = False

    @property
    def disabled(self) -> bool:
        """Whether the script has said so of this logger."""
        return self._is_disabled

    @disabled.setter
    def disabled(self, disabled: bool) -> None:
        caller = sys._getframe(1).f_globals.get("__name__")
        if not disabled or caller != "logging.config":
            self._is_disabled = disabled

    def callHandlers(self, record: logging.LogRecord) -> None:
        handlers = list(_handlers_of(self))
        if not handlers:
            _stderr.handle(record)
        is_shown = False
        for handler in handlers:
            if record.levelno < handler.level:
                continue
            if not _is_terminal(handler) or not _is_plain(handler.formatter):
                handler.handle(record if _shows_name(handler) else _prefixed(record))
            elif not is_shown:
                # A copy shares the stream and the lock; the script's keeps its own format.
                ours = copy.copy(handler)
                ours.formatter = _line
                is_shown = bool(ours.handle(copy.copy(record)))


def _handlers_of(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Those of `logger`, and those of the loggers above it to which it hands its records."""
    above: logging.Logger | None = logger
    while above is not None:
        yield from (h for h in above.handlers if not isinstance(h, logging.NullHandler))
        above = above.parent if above.propagate else None


def _is_plain(formatter: logging.Formatter | None) -> bool:
    """Whether lines are laid out by a format alone, and not by a class of the script's."""
    return formatter is None or type(formatter) is logging.Formatter


def _is_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return isinstance(handler, logging.StreamHandler) and any(
        handler.stream is stream for stream in streams
    )


def _shows_name(handler: logging.Handler) -> bool:
    """Whether lines of `handler` name their logger anyway."""
    formatter = handler.formatter
    style = getattr(formatter, "_fmt", None) or ""
    return any(name in style for name in ("%(name)", "{name", "$name", "${name"))


def _prefixed(record: logging.LogRecord) -> logging.LogRecord:
    prefixed = copy.copy(record)
    prefixed.msg, prefixed.args = f"{_PREFIX}{record.getMessage()}", None
    return prefixed
