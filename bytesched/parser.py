"""Options of commands: what they take, and what is said of a word that none of them knows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from bytesched.errors import ConfigError
from bytesched.values import closest

T = TypeVar("T")
NumberT = TypeVar("NumberT", int, float)


class Option(NamedTuple):
    """An option with a value."""

    flag: str
    metavar: str
    #: raises ArgumentTypeError
    read: Callable[[str], object]
    default: object
    help: str


class _Formatter(argparse.HelpFormatter):
    """Keeps lines of a text that has several, and fills those of others."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """A parser that shows all of its options for ``--help`` alone.

    Args:
        replaced: options of earlier versions, and what there is in place of each.
    """

    def __init__(self, *args: Any, replaced: Mapping[str, str] | None = None, **kwargs: Any):
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)
        self._replaced = replaced or {}

    def add_options(self, options: Iterable[Option]) -> None:
        """Adds options with a value."""
        for flag, metavar, read, default, line in options:
            self.add_argument(flag, metavar=metavar, type=read, default=default, help=line)

    def add_outputs(self, **written: str) -> None:
        """Adds ``-o``, which may be repeated: pairs of an ending, and of a file to be written.

        Args:
            written: by the ending, what such a file holds.
        """

        def read(text: str) -> tuple[str, str]:
            ending = Path(text).suffix[1:]
            if ending not in written:
                raise argparse.ArgumentTypeError(f"{text}: expected .{' or .'.join(written)}")
            return ending, writable_file(text)

        kinds = "; ".join(f".{ending}: {what}" for ending, what in written.items())
        self.add_argument(
            *("-o", "--output"),
            metavar="FILE",
            type=read,
            action="append",
            default=[],
            help=f"write a file; may be repeated. {kinds}",
        )

    def error(self, message: str) -> NoReturn:
        """Ends the process with 2; says what is wrong in one line."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        for word in words.split()[:1] if is_unknown else ():
            flag = word.partition("=")[0]
            if flag in self._replaced:
                message = f"{flag} is gone: {self._replaced[flag]}"
            elif meant := closest(word, self._option_string_actions):
                message += f"; did you mean {meant}?"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows what there is\n")


def within(least: NumberT, most: NumberT) -> Callable[[str], NumberT]:
    """A reader of numbers of this kind, from ``least`` to ``most``."""

    def read(text: str) -> NumberT:
        with suppress(ValueError):
            number = type(least)(text)
            if least <= number <= most:
                return number
        raise argparse.ArgumentTypeError(f"{text}: expected from {least:.7g} to {most:.7g}")

    return read


def read_by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A reader that says what ``parse`` says in its `ValueError`."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            whole = str(error) if isinstance(error, ConfigError) else f"{text}: {error}"
            raise argparse.ArgumentTypeError(whole) from None

    return read


def writable_file(text: str) -> str:
    """The path of a file to be written."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: it is a folder")
    return text
