"""Where log messages go."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bytesched import log


@contextmanager
def bare_application() -> Iterator[logging.Logger]:
    """The package's logger in an application that set up no logging, and all undone after."""
    root, logger = logging.getLogger(), logging.getLogger("bytesched")
    level, handlers, root_handlers = logger.level, list(logger.handlers), list(root.handlers)
    shown = log._shown
    root.handlers.clear()
    logger.setLevel(logging.NOTSET)
    try:
        yield logger
    finally:
        root.handlers[:] = root_handlers
        logger.handlers[:] = handlers
        logger.setLevel(level)
        log._shown = shown


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
        assert capsys.readouterr().err == "bytesched: [rank 3] error: lost\n"
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
    assert collector.seen == ["bytesched: started"]
    assert capsys.readouterr().err == ""
    assert logging.getLogger().level == logging.WARNING


FORMATS = {
    "basicConfig": logging.BASIC_FORMAT,
    "message alone": "%(message)s",
    "Ignite": "%(asctime)s %(name)s %(levelname)s: %(message)s",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stream", ["out", "err"])
def test_a_line_on_a_terminal_begins_with_the_name_whatever_the_format(
    capsys: pytest.CaptureFixture[str], name: str, stream: str
) -> None:
    with bare_application() as logger:
        log.show("INFO", rank=0)
        for _ in range(2):
            handler = logging.StreamHandler(getattr(sys, f"std{stream}"))
            handler.setFormatter(logging.Formatter(FORMATS[name]))
            logging.getLogger().addHandler(handler)
        logger.info("started with %d", 2)
        logging.getLogger("other").error("mine")
    said = getattr(capsys.readouterr(), stream).splitlines()
    assert said[0] == "bytesched: started with 2"
    assert len(said) == 3
    assert all(line.endswith("mine") and not line.startswith("bytesched") for line in said[1:])


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_names_us_once_in_its_own_format(tmp_path: Path, name: str) -> None:
    with bare_application() as logger:
        log.show("INFO", rank=0)
        handler = logging.FileHandler(tmp_path / "log")
        handler.setFormatter(logging.Formatter(FORMATS[name]))
        logging.getLogger().addHandler(handler)
        logger.info("started")
        handler.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.count("bytesched") == 1
    assert line.endswith("started")


def test_levels_and_filters_of_the_script_decide(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_application() as logger:
        log.show("INFO", rank=0)
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.WARNING)
        logger.info("root")
        handler.setLevel(logging.WARNING)
        logger.info("handler")
        handler.setLevel(logging.NOTSET)
        handler.addFilter(lambda record: record.name != "bytesched")
        logger.info("filter")
        handler.filters.clear()
        logger.setLevel(logging.ERROR)
        log.show("INFO", rank=0)
        logger.warning("level")
        logger.error("lost")
    assert capsys.readouterr().err == "bytesched: root\nbytesched: error: lost\n"


@pytest.mark.parametrize("is_shown_before", [True, False])
def test_a_configuration_that_does_not_name_us_leaves_us_enabled(is_shown_before: bool) -> None:
    # In a process of its own: a configuration closes all handlers that there are.
    show = "log.show('INFO', rank=0)\n"
    script = (
        "import logging, logging.config\n"
        "import bytesched.log as log\n"
        "logger = logging.getLogger('bytesched')\n"
        f"{show if is_shown_before else ''}"
        "logging.config.dictConfig({'version': 1})\n"
        "assert logging.getLogger('bytesched') is logger\n"
        f"{show}"
        "logger.info('started')\n"
        "logger.disabled = True\n"
        "logger.error('disabled by the script')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True
    )
    assert ended.stderr == "bytesched: started\n"
