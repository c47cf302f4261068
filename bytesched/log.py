"""Where the messages of the logger `bytesched` go; the root logger is never touched."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("bytesched")


class _Stderr(logging.Handler):
    """Writes to stderr as long as the application has no logging of its own."""

    rank = 0

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        where = f"[rank {self.rank}] " if self.rank else ""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        try:
            sys.stderr.write(f"{where}bytesched: {level}{self.format(record)}\n")
        except (OSError, ValueError):
            self.handleError(record)


_stderr = _Stderr()


def show(level: str, rank: int) -> None:
    """Show messages on stderr, unless the application has set up logging of its own.

    Rank 0 shows those of `level` and above, the other ranks no less than warnings, except that
    DEBUG shows everything everywhere. Another call changes level and rank, and adds nothing.
    """
    wanted: int = getattr(logging, level)
    everything = rank == 0 or wanted <= logging.DEBUG
    _stderr.rank = rank
    _log.setLevel(wanted if everything else max(wanted, logging.WARNING))
    _log.addHandler(_stderr)
