"""The options of `bytesched sim`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from bytesched.bench.profile import shipped_profiles
from bytesched.bench.systems import EXCHANGE_SYSTEMS
from bytesched.link.algorithms import ALGORITHMS, GLOO_RANKS, LIBRARIES
from bytesched.parser import CommandParser
from bytesched.sim.curve import AXES
from bytesched.sim.recorded import recorded_jitter
from bytesched.sim.systems import SYSTEMS

__all__ = ["jitter", "sim_parser"]

MOST_RANKS = 4096
EPILOG = """\
  bytesched sim --profile gpt --ranks 2,8,64 --bandwidth 10gbit
  bytesched bench --model my.models:build --record mine.json --systems ddp --rounds 1
  bytesched sim --profile mine.json --ranks 8,64,1024 --bandwidth 100gbit --latency-us 10
"""


def sim_parser() -> argparse.ArgumentParser:
    """The parser of its arguments."""
    parser = CommandParser(
        prog="bytesched sim",
        description="Predict the time of an iteration of DDP, FSDP2 and bytesched on a cluster:\n"
        "the decisions are those of the real code, the links are a model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Any = parser.add_argument
    shipped = ", ".join(shipped_profiles())
    add("--profile", default="gpt", metavar="PROFILE", help=f"the model: {shipped} or FILE.json")
    add(
        "--ranks", type=_ranks, default=[2, 8, 64], metavar="LIST", help="numbers of ranks (2,8,64)"
    )
    add(
        "--bandwidth",
        default="10gbit",
        metavar="RATE",
        help="bandwidth of each rank's link (%(default)s)",
    )
    add(
        "--latency-us",
        type=_positive,
        default=30.0,
        metavar="US",
        help="latency of one message (%(default)s)",
    )
    add(
        "--algorithm",
        choices=("auto", *ALGORITHMS),
        default="auto",
        help="how an all-reduce runs: one of these, or what the library takes for its size and "
        "ranks (default auto)",
    )
    add(
        "--backend",
        choices=[name for name in LIBRARIES if name != "auto"],
        help=f"the library; nccl: the start of a collective does not hide behind the one before it "
        f"(default gloo; mpi for more than {GLOO_RANKS} ranks)",
    )
    add(
        "--cores-per-rank",
        type=_positive,
        metavar="C",
        help="cores that each rank has, 0.5 where two share one (default: enough; with --measure "
        "those of this machine)",
    )
    add(
        "--cpu-load",
        type=_load,
        default=0.0,
        metavar="X",
        help="cores that the model itself keeps busy, 1 where it computes on one (default 0: it "
        "computes on an accelerator)",
    )
    add(
        "--measure",
        action="store_true",
        help="take bandwidth and latency, cores and what messages, tensors and bytes cost them "
        "from the ranks that a launcher has started, or two processes here (half a minute)",
    )
    add(
        "--systems",
        metavar="LIST",
        help=f"what to predict ({','.join(SYSTEMS)}; of a profile with layers of experts "
        f"{','.join(EXCHANGE_SYSTEMS)})",
    )
    add(
        "--share",
        nargs="?",
        const="",
        metavar="PROFILES",
        help="predict jobs that take turns on shared devices: beside that of --profile one like "
        "it, or one of each of these",
    )
    add("--clip", action="store_true", help="the script clips by the norm of all gradients")
    add(
        "--compute-scale",
        type=_positive,
        default=1.0,
        metavar="X",
        help="a device that is X times as slow",
    )
    add(
        "--update-gb-per-s",
        type=_positive,
        metavar="X",
        help="gradients that the optimizer applies in a second (default: 100, or as measured)",
    )
    add(
        "--jitter",
        type=jitter,
        default=0.0,
        metavar="X%|TRACE",
        help="how much a rank's compute varies between iterations, or what a trace recorded",
    )
    add(
        "--straggler",
        type=_straggler,
        metavar="RANK:X%",
        help="a rank whose compute always takes so much longer",
    )
    add(
        "--iterations",
        type=int,
        default=40,
        metavar="N",
        help="how many to simulate (default %(default)s)",
    )
    add("--curve", choices=AXES, help="go along an axis, from the first of --ranks")
    add("--json", metavar="FILE", help="write every figure")
    add("--png", metavar="FILE", help="draw where it pays over bandwidth and ranks, or the curve")
    return parser


def _ranks(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not 2 <= found[0] <= found[-1] <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: from 2 to {MOST_RANKS}, as 2,8,64")
    return found


def _share(text: str) -> float:
    """A share such as 3% or 0.03."""
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if rest or not 0 <= share <= 10:
        raise argparse.ArgumentTypeError(f"{text!r}: a share, as 3% or 0.03")
    return share


def jitter(text: str) -> float:
    """A share such as 3%, or what a trace file has recorded. Raises ArgumentTypeError."""
    path = Path(text)
    if not path.is_file():
        return _share(text)
    try:
        return recorded_jitter(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _straggler(text: str) -> tuple[int, float]:
    rank, _, late = text.partition(":")
    if not rank.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a rank and by how much it is late, as 1:30%")
    return int(rank), _share(late)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive number")
    return number


def _load(text: str) -> float:
    return 0.0 if text == "0" else _positive(text)
