"""Where log messages go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bytesched import log


@contextmanager
def bare_application() -> Iterator[logging.Logger]:
    """The package's logger in an application that set up no logging, and all undone after."""
    root, logger = logging.getLogger(), logging.getLogger("bytesched")
    level, handlers, root_handlers = logger.level, list(logger.handlers), list(root.handlers)
    root.handlers.clear()
    try:
        yield logger
    finally:
        root.handlers[:] = root_handlers
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_rank_0_shows_the_level_and_adds_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_application() as logger:
        log.show("INFO", rank=0)
        log.show("INFO", rank=0)
        logger.info("started with %d", 2)
        logger.debug("detail")
        logger.warning("slow")
    assert capsys.readouterr().err == "bytesched: started with 2\nbytesched: warning: slow\n"


def test_other_ranks_show_warnings_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_application() as logger:
        log.show("INFO", rank=3)
        logger.info("started")
        logger.error("lost")
        assert capsys.readouterr().err == "[rank 3] bytesched: error: lost\n"
        log.show("DEBUG", rank=3)
        logger.debug("detail")
    assert "detail" in capsys.readouterr().err


def test_traceback_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_application() as logger:
        log.show("INFO", rank=0)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            logger.exception("observer failed")
    assert "ZeroDivisionError" in capsys.readouterr().err


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def test_an_application_with_logging_gets_the_messages_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    collector = Collector()
    with bare_application() as logger:
        log.show("INFO", rank=0)
        logging.getLogger().addHandler(collector)
        logger.info("started")
    assert collector.seen == ["started"]
    assert capsys.readouterr().err == ""
    assert logging.getLogger().level == logging.WARNING
