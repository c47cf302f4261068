"""The command `run`: a training script as it is, with its optimizers wrapped on the way."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from bytesched import log
from bytesched.config import FIELDS, GONE, Config, set_on_command_line
from bytesched.environment import rank_view
from bytesched.errors import ConfigError
from bytesched.parser import CommandParser
from bytesched.policy import named_policy
from bytesched.run.copies import watch_copies
from bytesched.run.script import loaded
from bytesched.run.watch import noticed_something, watch
from bytesched.tuning.online import find_tuner

CANNOT_START = 2

_log = logging.getLogger("bytesched")

#: fields that are paths, relative to the folder in which the command was given
_PATHS = frozenset({"figures", "timeline", "tune_file"})


def main(argv: Sequence[str]) -> int:
    """Run a script; returns 0 at its end, or 2 if it could not be started.

    What the script raises, `SystemExit` included, is raised again.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    program, *rest = arguments.command
    if program == "--":
        program, *rest = rest
    try:
        set_on_command_line(arguments.settings)
        config = Config.load()
        named_policy(config.policy, config.origin("policy"))
        find_tuner(config)
    except ConfigError as error:
        parser.error(str(error))
    log.show(config.log_level, rank_view().rank)
    try:
        run = loaded(program, is_module=arguments.is_module)
    except OSError as error:
        parser.exit(CANNOT_START, f"bytesched run: can't open {program!r}: {error}\n")
    if config.enabled:
        _watch(program, is_module=arguments.is_module)
        # Registered before anything of the script, so called after it.
        atexit.register(_say_if_nothing, tunes=config.tune)
    run(rest)
    return 0


def run_copy(argv: Sequence[str]) -> None:
    """Run a copy of the script, which this one was started with, as the script's own child.

    Settings are in the environment already.
    """
    is_module = argv[0] == "-m"
    program, *rest = argv[is_module:]
    run = loaded(program, is_module=is_module)
    _watch(program, is_module=is_module)
    run(rest)


def _watch(program: str, *, is_module: bool) -> None:
    watch({"subprocess": partial(watch_copies, program=program, is_module=is_module)})


def _say_if_nothing(*, tunes: bool) -> None:
    is_expected = rank_view().world_size == 1 and not tunes
    if not (noticed_something() or hasattr(sys, "last_value") or is_expected):
        _log.info(
            "nothing to schedule: the script made neither a DistributedDataParallel nor an "
            "optimizer of Horovod's"
        )


class _Setting(argparse.Action):
    """Collects fields of `Config`, by name: the last option that sets one wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name, text = self.dest, values
        if option_string == "--off":
            name, text = "enabled", "0"
        elif option_string == "--set":
            name, equals, text = values.partition("=")
            if not equals:
                parser.error(f"--set {values}: write --set FIELD=VALUE")
        if name in _PATHS and text:
            text = os.path.abspath(text)
        namespace.settings = {**namespace.settings, name: text}


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bytesched run",
        usage="bytesched run [options] script.py [arguments]\n"
        "       bytesched run [options] -m package.module [arguments]",
        description="Run a training script unchanged. Its optimizers over a "
        "DistributedDataParallel, and those of Horovod, are wrapped as bytesched.wrap would; "
        "what cannot be wrapped is left as it was, and the log says so once.",
        epilog="Under a launcher: torchrun --nproc-per-node 2 -m bytesched run train.py, or "
        "horovodrun -np 2 python -m bytesched run train.py",
        replaced={f"--{name.replace('_', '-')}": why for name, why in GONE.items()},
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.set_defaults(settings={}, is_module=False)
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action=_Setting,
        help="a setting, of those that `bytesched doctor --config` lists; may be repeated. The "
        "same as --FIELD VALUE, such as --timeline FOLDER or --share NAME",
    )
    for name in FIELDS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, action=_Setting, help=argparse.SUPPRESS)
    parser.add_argument(
        "--off", nargs=0, action=_Setting, help="run the script as it is, to compare"
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    # Not REMAINDER, which loses a -- that is the first of the script's own arguments.
    parser.add_argument(
        "command",
        metavar="script.py",
        nargs=argparse.PARSER,
        help="what to run, and its own arguments",
    )
    return parser
