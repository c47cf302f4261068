"""The pictures that `bytesched report` draws, by name; other packages add theirs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["PICTURES", "Picture"]


class Picture(NamedTuple):
    """A picture on the command line, which writes it to ``options.output``."""

    #: one line of help
    line: str
    add_arguments: Callable[[ArgumentParser], None]
    #: raises ``OSError`` or ``ValueError`` for a file that cannot be used
    draw: Callable[[Namespace], None]
    #: how to get the files that it is drawn of, where its arguments do not say that
    epilog: str = ""


PICTURES: dict[str, Picture] = {}
