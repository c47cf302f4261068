"""`bytesched bench`: data-parallel systems measured in turn on the same work.

On emulated hosts (``--lab``), as several processes on this machine, or under torchrun on hosts of
one's own. The ranks are processes of their own; this one starts them, waits and reports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.bench.picture import draw_bench
from bytesched.bench.profile import parse_profile, save_all, shipped_profiles
from bytesched.bench.specification import (
    DEFAULT_CONTROLLER,
    MODELS,
    OPTIMIZERS,
    Specification,
    specification,
)
from bytesched.bench.systems import HOROVOD_SYSTEMS, SYSTEMS
from bytesched.bench.table import add_figures, table, thread_table
from bytesched.environment import rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.ranks import Start, run_all, run_own

WORKER = "bytesched.plugins.bench.worker"
CONTROLLERS = {"gloo": "Gloo", "mpi": "MPI"}
DEFAULT_RATE = "1gbit"
BUSY_LOAD = 1.0
TERMINATED = 143
EPILOG = """\
Further systems: ddp-finalize (torch 2.15), ddp-accelerate, zero1, deepspeed, horovod,
horovod-best (swept), horovod-autotune, bytesched-horovod; through parameter servers over MPI:
kv-plain, kv-p3, bytesched-kv.
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
  torchrun --nproc-per-node 1 --nnodes 2 ... -m bytesched bench --model gpt --json gpt.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when every system was measured."""
    parser = _parser()
    options = parser.parse_args(argv)
    view = rank_view()
    launched = view.launcher != "none"
    try:
        spec = specification(options, view)
    except ConfigError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    load = os.getloadavg()[0]
    if load > BUSY_LOAD and not view.rank:
        print(f"this machine is busy (load {load:.1f}): expect noise", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bytesched-bench-") as folder:
        start = Start(
            WORKER,
            result=str(Path(folder, "result.json")),
            threads=spec.threads,
            by_mpi=spec.controller == "mpi" or spec.servers is not None,
            servers=spec.servers or 0,
            ranks_per_host=spec.ranks_per_host,
        )
        rate = (options.rate or DEFAULT_RATE) if options.lab else None
        stopped: BaseException | None = None
        try:
            if launched:
                network = run_own(spec, start, view)
            else:
                hosts = options.lab or options.workers or 2
                network = run_all(spec, start, hosts, rate, Path(folder))
        except (KeyboardInterrupt, SystemExit) as error:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            stopped = error
            network = f"ranks started by {view.launcher}" if launched else "loopback"
            if rate:
                network = f"links of {rate}, if they could be shaped, between emulated hosts"
        measured = stopped is None or Path(start.result).exists()
        if stopped is not None and view.rank == 0:
            how_far = "what was measured until then:" if measured else "nothing was measured yet"
            print(f"\nstopped before the end; {how_far}", flush=True)
        if view.rank == 0 and measured:
            if any(system.kind in HOROVOD_SYSTEMS for system in spec.systems):
                network += f", Horovod over {CONTROLLERS[spec.controller]}"
            if spec.servers is not None:
                network += f", a store over MPI, served by {spec.servers or 'every'} rank"
                network += "s" if spec.servers > 1 else ""
            _report(
                spec,
                start.result,
                options,
                argv,
                {
                    "network": network,
                    "load_before": load,
                    "stopped": stopped is not None,
                },
            )
    if stopped is not None:
        raise stopped
    return 0


def _report(
    spec: Specification,
    found: str,
    options: argparse.Namespace,
    argv: Sequence[str] | None,
    circumstances: dict[str, Any],
) -> None:
    result = json.loads(Path(found).read_text())
    emulated = spec.kind == "emulate"
    content: Any = spec.content
    name = content["name"] if emulated else content
    arguments = sys.argv[2:] if argv is None else argv
    result |= {
        "command": shlex.join(["bytesched", "bench", *arguments]),
        "workload": f"{name} (emulated compute)" if emulated else name,
        "emulated": emulated,
        "optimizer": spec.optimizer,
        "platform": platform.platform(),
        "python": platform.python_version(),
        **circumstances,
    }
    if options.record:
        recorded = result["compute"].pop("profiles")
        save_all([parse_profile(content, "recorded") for content in recorded], options.record)
    add_figures(result)
    print(f"\n{table(result)}")
    if options.cpu:
        print(f"\n{thread_table(result)}")
    figures = options.json or found
    write_text(Path(figures), json.dumps(result, indent=1) + "\n")
    if options.png:
        draw_bench(figures, options.png)
    for kind in ("record", "json", "png"):
        if getattr(options, kind):
            print(f"{kind}: {getattr(options, kind)}")


def _batches(text: str) -> list[int]:
    try:
        return sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, as 8 or 4,8,16") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bytesched bench",
        description="Measure data-parallel systems in turn on the same work.\n"
        "Says first how long that will take. When it is stopped (ctrl-C, SIGTERM) it prints the\n"
        "table of what was measured until then.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--systems", default=",".join(SYSTEMS), metavar="LIST", help="what to measure (%(default)s)"
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
    add("--workers", type=int, metavar="N", help="start N ranks here, over loopback (default 2)")
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
        "--autotune-iterations",
        type=int,
        default=100,
        metavar="N",
        help="iterations in which Horovod's autotuner may converge (%(default)s)",
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
    add("--cpu", action="store_true", help="print what each thread of rank 0 used")
    add("--json", metavar="FILE", help="write every figure")
    add("--png", metavar="FILE", help="write a chart")
    add("--record", metavar="FILE", help="write the model's compute profile, at every --batch")
    return parser
