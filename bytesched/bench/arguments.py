"""The arguments of `bytesched bench`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from bytesched.bench.profile import shipped_profiles
from bytesched.bench.systems import EXCHANGE_SYSTEMS, SYSTEMS
from bytesched.parser import CommandParser

NumberT = TypeVar("NumberT", int, float)

MODELS: Final = ("gpt", "vgg", "resnet")
CONTROLLERS: Final = {"gloo": "Gloo", "mpi": "MPI"}
DEFAULT_RATE: Final = "1gbit"
DEFAULT_WORKERS: Final = 2
#: what `same_again` leaves out
_OUTPUTS: Final = frozenset({"--json", "--png", "--record", "--compare"})
EPILOG: Final = """\
Further systems: ddp-finalize (torch 2.15), zero1, horovod, horovod-best (swept),
bytesched-horovod; through parameter servers over MPI: kv-plain, kv-p3, bytesched-kv.
A system may have options: ddp:bucket_mb=4, ddp:static_graph=1+bucket_view=1 (also of
ddp-finalize), bytesched:partition_bytes=512KiB+credit_bytes=1MiB,
horovod:fusion_mb=4+cycle_ms=1, horovod-best:fusion_mb=4 (the cycle time alone is swept),
kv-p3:slice=50000, kv-plain:transfer=one-sided; those of bytesched-horovod and bytesched-kv are
those of bytesched, and updates=1 of the latter.
--model also takes module:function of your own; the function returns a pair: the module, and a
function loss(module, seed) that runs forward on the batch of that seed and returns its loss.

  bytesched bench --lab 2 --rate 1gbit --emulate gpt
  bytesched bench --lab 2 --emulate gpt --controller mpi --systems horovod,bytesched-horovod
  bytesched bench --model vgg --batch 4,8,16,32 --record vgg.json --systems ddp --rounds 1
  bytesched bench --lab 2 --servers 1 --emulate vgg --systems kv-plain,kv-p3,bytesched-kv
  bytesched bench --lab 2 --rate 500mbit --emulate moe --comm-ratio 1
  bytesched bench --lab 2 --rate 250mbit --emulate gpt --comm-ratio 1 --share
  bytesched bench --gpu-ranks 2 --batch 16 --clip 1
  bytesched bench --compare gpt.json --json now.json
  torchrun --nproc-per-node 1 --nnodes 2 ... -m bytesched bench --model gpt --json gpt.json
"""


def same_again(command: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of ``command``, which a result has recorded, and after them ``arguments``.

    Files that it wrote, and what it was compared with, are left out.
    """
    recorded = shlex.split(command)
    recorded = recorded[recorded.index("bench") + 1 :] if "bench" in recorded else []
    words = [part for word in recorded for part in word.split("=", word.startswith("--"))]
    kept: list[str] = []
    flag = ""
    for word in words:
        flag = word if word.startswith("--") else flag
        if flag == "--batch" != word and "--record" in words:
            # What systems got.
            kept.append(str(_batches(word)[-1]))
        elif flag not in _OUTPUTS:
            kept.append(word)
    return [*kept, *arguments]


def _batches(text: str) -> list[int]:
    try:
        return sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, as 8 or 4,8,16") from None


def _within(least: NumberT, most: NumberT) -> Callable[[str], NumberT]:
    """A parser of numbers of this kind, from ``least`` to ``most``."""

    def parse(text: str) -> NumberT:
        with suppress(ValueError):
            number = type(least)(text)
            if least <= number <= most:
                return number
        raise argparse.ArgumentTypeError(f"{text}: expected from {least:g} to {most:g}")

    return parse


_MOST: Final = 1_000_000
_RANKS, _COUNT, _SCALE = _within(2, 64), _within(1, _MOST), _within(1e-3, 1e6)
#: what takes a number: how it is read, what it is if it is not given, its sign, its help
_NUMBERS: Final[tuple[tuple[str, Callable[[str], float], float | None, str, str], ...]] = (
    ("lab", _RANKS, None, "N", "start ranks on N hosts emulated on this machine"),
    ("ranks-per-host", _within(1, 64), 1, "N", "ranks on each emulated host"),
    (
        *("workers", _RANKS, None, "N"),
        f"start N ranks here, over loopback (default {DEFAULT_WORKERS})",
    ),
    ("iterations", _COUNT, 20, "N", "timed iterations per round"),
    ("rounds", _COUNT, 3, "N", "rounds, in each of which every system has a turn"),
    ("warmup", _within(2, _MOST), 5, "N", "untimed iterations per round"),
    ("sweep-iterations", _COUNT, 8, "N", "timed iterations per swept setting"),
    ("servers", _within(0, 32), None, "N", "ranks that serve; 0: all do (default 1)"),
    ("clip", _within(0.0, 1e6), 0.0, "NORM", "clip by the norm of all gradients; 0: do not"),
    ("compute-scale", _SCALE, 1.0, "X", "emulate a device X x slower"),
    ("comm-ratio", _SCALE, None, "X", "emulate communication of X x compute"),
    ("threads", _within(0, _MOST), 1, "N", "threads of torch per rank; 0: as torch chooses"),
    ("timeout-s", _SCALE, 300.0, "S", "longest time of one collective"),
    (
        *("gpu-ranks", _within(2, 16), None, "N"),
        "measure N ranks over NCCL on one device, under MPS if that is installed: DDP with "
        "several bucket sizes, FSDP2 and bytesched, and T* beside them; --model gpt, conv or small",
    ),
)
_TEXTS: Final = (
    (
        *("systems", "LIST"),
        f"what to measure ({','.join(SYSTEMS)}; of a profile with layers of experts "
        f"{','.join(EXCHANGE_SYSTEMS)})",
    ),
    ("model", "NAME", f"{', '.join(MODELS)} or module:function (default {MODELS[0]})"),
    (
        *("emulate", "PROFILE"),
        f"emulate the compute of {', '.join(shipped_profiles())} or FILE.json",
    ),
    ("rate", "RATE", f"link of each emulated host (default {DEFAULT_RATE})"),
    ("json", "FILE", "write every figure"),
    ("png", "FILE", "write a chart"),
    ("record", "FILE", "write the model's compute profile, at every --batch"),
)


def bench_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = CommandParser(
        prog="bytesched bench",
        description="Measure data-parallel systems in turn on the same work.\n"
        "Says first how long that will take. When it is stopped (ctrl-C, SIGTERM) it prints the\n"
        "table of what was measured until then.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, sign, meaning in _TEXTS:
        add(f"--{name}", metavar=sign, help=meaning)
    for name, parse, default, sign, meaning in _NUMBERS:
        shown = "" if default is None else " (%(default)s)"
        add(f"--{name}", type=parse, default=default, metavar=sign, help=meaning + shown)
    add(
        "--batch",
        type=_batches,
        default=[0],
        metavar="N",
        help="batch size of each rank, of real models; several of them for --record, of which "
        "systems get the largest",
    )
    add("--controller", choices=CONTROLLERS, help="controller of Horovod (default gloo)")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="default %(default)s")
    add(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="OLD.json: measure the same again, and fail on a regression; OLD.json NEW.json: "
        "compare two results",
    )
    add(
        "--share",
        nargs="?",
        const="",
        metavar="PROFILES",
        help="measure jobs that share devices and links: alone, side by side and in turns; beside "
        "that of --emulate one like it, or one of each of these profiles",
    )
    add(
        "--device",
        choices=("cuda", "cpu"),
        help="of --gpu-ranks (default cuda); cpu tries the same with tiny models over Gloo",
    )
    add("--trace", action="store_true", help="print an iteration of bytesched with --gpu-ranks")
    return parser
