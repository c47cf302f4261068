"""Arguments of commands: a word that none of them knows is answered with the one that was meant."""

from __future__ import annotations

import argparse
from typing import NoReturn

from bytesched.values import closest

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """A parser that shows all of its options for ``--help`` alone."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with 2; says what is wrong in one line."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        for word in words.split()[:1] if is_unknown else ():
            if meant := closest(word, self._option_string_actions):
                message += f"; did you mean {meant}?"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows what there is\n")
