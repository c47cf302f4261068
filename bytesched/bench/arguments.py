"""The arguments of `bytesched bench`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Final

from bytesched.bench.profile import shipped_profiles
from bytesched.bench.setting import DEFAULT_RATE, DEFAULT_WORKERS
from bytesched.bench.specification import DEFAULT_CONTROLLER, MODELS, OPTIMIZERS
from bytesched.bench.systems import EXCHANGE_SYSTEMS, SYSTEMS
from bytesched.parser import CommandParser

__all__ = ["CONTROLLERS", "bench_parser", "same_again"]

CONTROLLERS: Final = {"gloo": "Gloo", "mpi": "MPI"}
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
    kept: list[str] = []
    is_kept = True
    for argument in recorded[recorded.index("bench") + 1 :] if "bench" in recorded else []:
        if argument.startswith("--"):
            is_kept = argument.partition("=")[0] not in _OUTPUTS
        if is_kept:
            kept.append(argument)
    if "--record" in {argument.partition("=")[0] for argument in recorded}:
        kept = _largest_batch(kept)
    return [*kept, *arguments]


def _largest_batch(arguments: Sequence[str]) -> list[str]:
    """The same with the largest batch of a list, which is what systems get."""
    found: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "--batch" and equals:
            found.append(f"{name}={max(_batches(value))}")
        elif found and found[-1] == "--batch":
            found.append(str(max(_batches(argument))))
        else:
            found.append(argument)
    return found


def _batches(text: str) -> list[int]:
    try:
        return sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, as 8 or 4,8,16") from None


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
    add(
        "--systems",
        metavar="LIST",
        help=f"what to measure ({','.join(SYSTEMS)}; of a profile with layers of experts "
        f"{','.join(EXCHANGE_SYSTEMS)})",
    )
    add("--model", metavar="NAME", help=f"{', '.join(MODELS)} or module:function (default gpt)")
    shipped = ", ".join(shipped_profiles())
    add("--emulate", metavar="PROFILE", help=f"emulate the compute of {shipped} or FILE.json")
    add("--lab", type=int, metavar="N", help="start ranks on N hosts emulated on this machine")
    add(
        "--ranks-per-host",
        type=int,
        default=1,
        metavar="N",
        help="ranks on each emulated host (%(default)s)",
    )
    add("--rate", metavar="RATE", help=f"link of each emulated host (default {DEFAULT_RATE})")
    add(
        "--workers",
        type=int,
        metavar="N",
        help=f"start N ranks here, over loopback (default {DEFAULT_WORKERS})",
    )
    add(
        "--iterations",
        type=int,
        default=20,
        metavar="N",
        help="timed iterations per round (%(default)s)",
    )
    add(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="rounds, in each of which every system has a turn (%(default)s)",
    )
    add(
        "--warmup",
        type=int,
        default=5,
        metavar="N",
        help="untimed iterations per round (%(default)s)",
    )
    add(
        "--sweep-iterations",
        type=int,
        default=8,
        metavar="N",
        help="timed iterations per swept setting (%(default)s)",
    )
    add("--servers", type=int, metavar="N", help="ranks that serve; 0: all do (default 1)")
    add(
        "--controller",
        choices=CONTROLLERS,
        help=f"controller of Horovod (default {DEFAULT_CONTROLLER})",
    )
    add(
        "--batch",
        type=_batches,
        default=[0],
        metavar="N",
        help="batch size of each rank, of real models; several of them for --record, of which "
        "systems get the largest",
    )
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help="default %(default)s")
    add("--clip", type=float, default=0.0, metavar="NORM", help="clip by the norm of all gradients")
    add("--compute-scale", type=float, default=1.0, metavar="X", help="emulate a device X x slower")
    add("--comm-ratio", type=float, metavar="X", help="emulate communication of X x compute")
    add(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads of torch per rank; 0: as many as torch chooses",
    )
    add(
        "--timeout-s", type=float, default=300.0, metavar="S", help="longest time of one collective"
    )
    add("--json", metavar="FILE", help="write every figure")
    add("--png", metavar="FILE", help="write a chart")
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
        "--gpu-ranks",
        type=int,
        metavar="N",
        help="measure N ranks over NCCL on one device, under MPS if that is installed: DDP with "
        "several bucket sizes, FSDP2 and bytesched, and T* beside them; --model gpt, conv or small",
    )
    add(
        "--device",
        choices=("cuda", "cpu"),
        help="of --gpu-ranks (default cuda); cpu tries the same with tiny models over Gloo",
    )
    add("--trace", action="store_true", help="print an iteration of bytesched with --gpu-ranks")
    add("--record", metavar="FILE", help="write the model's compute profile, at every --batch")
    return parser
