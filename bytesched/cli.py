"""The command `bytesched`: finds the subcommand and hands the other arguments to it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import bytesched
from bytesched import log
from bytesched.environment import rank_view
from bytesched.errors import BytesschedError, ConfigError
from bytesched.parser import CommandParser
from bytesched.values import nearest

#: as a shell has it of a command that a signal ended
INTERRUPTED, PIPE_CLOSED = 130, 141


class Command(NamedTuple):
    """A module whose `main(argv) -> exit code` runs the command, and a line about it."""

    module: str
    line: str
    #: what it raises is the user's own affair, and goes on to the interpreter
    runs_user_code: bool = False


COMMANDS = {
    "run": Command(
        "bytesched.commands.run", "run a training script unchanged, but scheduled", True
    ),
    "bench": Command(
        "bytesched.commands.bench", "measure DDP, FSDP2 and bytesched in turn on the same work"
    ),
    "sim": Command("bytesched.commands.sim", "predict the gain on a cluster that is not here"),
    "burst": Command("bytesched.commands.burst", "plan how many devices each layer gets"),
    "pipeline": Command(
        "bytesched.commands.pipeline", "find an order of work for pipeline parallelism"
    ),
    "report": Command("bytesched.commands.report", "print, merge or draw timelines and results"),
    "doctor": Command(
        "bytesched.commands.doctor", "check versions, backends, ranks and the network"
    ),
}

_TIMELINE = "bytesched report DIR|FILE -o OUT.json, for ui.perfetto.dev"
_TUNINGS = "bytesched report FILE prints one; to forget it, remove it"
#: names of earlier versions, and what there is in place of each
REPLACED = {
    "trace": "bytesched report DIR|FILE...",
    "trace merge": "bytesched report DIR|FILE... -o OUT.json",
    "report bench": "bytesched report RESULT.json... -o OUT.png",
    "report graph": "bytesched report TRACE.json...",
    "report iteration": "bytesched report BEFORE AFTER -o OUT.png",
    "report timeline": _TIMELINE,
    "report tuning": "bytesched report TUNING.json",
    "burst timeline": _TIMELINE,
    "tune": f"bytesched run --tune 1 tunes; tunings are in ~/.cache/bytesched/tuning: {_TUNINGS}",
    "wave": "what it measured is in the notes on waves",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 well, 1 failed, 2 misused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    name, rest = arguments[0], arguments[1:]
    if name.startswith("-"):
        parser.parse_args([name])
    verb = [word for word in rest[:1] if not Path(word).exists()]
    for old in (" ".join([name, *verb]), name):
        if old in REPLACED:
            parser.error(f"{old} is gone: {REPLACED[old]}")
    if name not in COMMANDS:
        parser.error(f"there is no command {name!r}{nearest(name, COMMANDS)}")
    log.show("WARNING", rank_view().rank)
    command = importlib.import_module(COMMANDS[name].module).main
    if COMMANDS[name].runs_user_code:
        return int(command(rest))
    try:
        return int(command(rest))
    except ConfigError as error:
        CommandParser(prog=f"bytesched {name}").error(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has enough: what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (BytesschedError, OSError) as error:
        print(f"bytesched {name}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.line}" for name, command in COMMANDS.items()]
    parser = CommandParser(
        prog="bytesched",
        usage="bytesched <command> [options]",
        description="Communication scheduling for data-parallel training.",
        epilog="\n".join(
            (
                "commands:",
                *lines,
                "",
                "'bytesched <command> --help' shows more. In a training script:",
                "  optimizer = bytesched.wrap(optimizer, model)",
            )
        ),
    )
    parser.add_argument("--version", action="version", version=f"bytesched {bytesched.__version__}")
    return parser
