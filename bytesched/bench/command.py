"""`bytesched bench`: data-parallel systems measured in turn on the same work.

On emulated hosts (``--lab``), as several processes on this machine, or under torchrun on hosts of
one's own. The ranks are processes of their own; this one starts them, waits and reports.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from bytesched.bench.profile import load_profile, parse_profile, save_all, shipped_profiles
from bytesched.bench.systems import (
    HOROVOD_SYSTEMS,
    KVSTORE_SYSTEMS,
    SYSTEMS,
    check_horovod,
    check_kvstore,
    parse_systems,
)
from bytesched.bench.table import add_figures, table
from bytesched.environment import RankView, rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.ranks import run_all, run_own
from bytesched.values import nearest

CONTROLLERS = {"gloo": "Gloo", "mpi": "MPI"}
MODELS = ("gpt", "vgg", "resnet")
OPTIMIZERS = ("adamw", "sgd")
DEFAULT_RATE = "1gbit"
DEFAULT_CONTROLLER = "gloo"
DEFAULT_SERVERS = 1
BUSY_LOAD = 1.0
LEAST_AUTOTUNE_ITERATIONS = 60
TERMINATED = 143
EPILOG = """\
Further systems: horovod, horovod-best (swept), horovod-autotune, bytesched-horovod; through
parameter servers over MPI: kv-plain, kv-p3, bytesched-kv.
A system may have options: ddp:bucket_mb=4, bytesched:partition_bytes=512KiB+credit_bytes=1MiB,
horovod:fusion_mb=4+cycle_ms=1, kv-p3:slice=50000, kv-plain:transfer=one-sided; those of
bytesched-horovod and bytesched-kv are those of bytesched, and updates=1 of the latter.
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
        spec["result"] = str(Path(folder, "result.json"))
        if launched:
            network = run_own(spec, view)
        else:
            rate = (options.rate or DEFAULT_RATE) if options.lab else None
            network = run_all(spec, options.lab or options.workers or 2, rate, Path(folder))
        if view.rank == 0:
            if any(system["kind"] in HOROVOD_SYSTEMS for system in spec["systems"]):
                network += f", Horovod over {CONTROLLERS[spec['controller']]}"
            if spec["servers"] is not None:
                network += f", a store over MPI, served by {spec['servers'] or 'every'} rank"
                network += "s" if spec["servers"] > 1 else ""
            _report(spec, options, argv, {"network": network, "load_before": load})
    return 0


def specification(options: argparse.Namespace, view: RankView) -> dict[str, Any]:
    """What every rank is told. Raises `ConfigError` for what cannot be run."""
    _check_launch(options, view)
    _check_numbers(options)
    _check_outputs(options)
    kind, content = "model", options.model
    if options.emulate:
        kind, content = "emulate", load_profile(options.emulate).to_json()
    elif ":" in options.model:
        kind = "user"
    elif options.model not in MODELS:
        raise ConfigError(f"--model {options.model!r}{nearest(options.model, MODELS)}")
    if kind != "emulate" and (options.comm_ratio or options.compute_scale != 1.0):
        raise ConfigError(
            "--comm-ratio and --compute-scale change emulated compute and need --emulate; "
            "for a real model change --batch"
        )
    _check_batches(options.batch, kind, recorded=bool(options.record))
    systems = parse_systems(options.systems)
    check_horovod(systems, options.controller, view.launcher)
    check_kvstore(systems, options.servers, view.launcher)
    servers = None
    if systems[0]["kind"] in KVSTORE_SYSTEMS:
        servers = DEFAULT_SERVERS if options.servers is None else options.servers
    return {
        "systems": systems,
        "kind": kind,
        "content": content,
        "batch": options.batch[-1],
        "iterations": options.iterations,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "sweep": options.sweep_iterations,
        "autotune": options.autotune_iterations,
        "controller": options.controller or DEFAULT_CONTROLLER,
        "servers": servers,
        "optimizer": options.optimizer,
        "compute_scale": options.compute_scale,
        "comm_ratio": options.comm_ratio,
        "record": options.batch if options.record else [],
        "threads": options.threads,
        "timeout_s": options.timeout_s,
    }


def _check_launch(options: argparse.Namespace, view: RankView) -> None:
    if options.model and options.emulate:
        raise ConfigError("--model and --emulate exclude each other")
    if not options.model and not options.emulate:
        options.model = MODELS[0]
    if view.launcher != "none":
        if options.lab or options.workers:
            raise ConfigError(f"--lab and --workers start ranks, and {view.launcher} has done so")
        if view.world_size < 2:
            raise ConfigError(f"{view.launcher} started one rank, which has nothing to send")
    if options.lab and options.workers:
        raise ConfigError("--lab and --workers exclude each other")
    if options.rate and not options.lab:
        raise ConfigError("--rate shapes the links of emulated hosts and needs --lab N")
    for name in ("lab", "workers"):
        value = getattr(options, name)
        if value is not None and not 2 <= value <= 64:
            raise ConfigError(f"--{name} {value}: from 2 to 64")


def _check_numbers(options: argparse.Namespace) -> None:
    least = {
        "iterations": 1,
        "rounds": 1,
        "warmup": 2,
        "sweep_iterations": 1,
        "autotune_iterations": LEAST_AUTOTUNE_ITERATIONS,
        "threads": 0,
    }
    for name, lowest in least.items():
        if getattr(options, name) < lowest:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(options, name)}: at least {lowest}")
    for name in ("comm_ratio", "compute_scale", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not 1e-3 <= value <= 1e6:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: a positive number, 0.001 to 1000000")
    if options.comm_ratio and options.compute_scale != 1.0:
        raise ConfigError("--comm-ratio and --compute-scale exclude each other")


def _check_batches(batches: Sequence[int], kind: str, *, recorded: bool) -> None:
    several = len(batches) > 1
    if batches[0] < several:
        raise ConfigError(f"--batch {batches[0]}: at least {several:d}")
    if several and (kind != "model" or not recorded):
        raise ConfigError(
            f"--batch with several sizes is for --record of {', '.join(MODELS)}: systems are "
            "measured with one"
        )


def _batches(text: str) -> list[int]:
    try:
        return sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, as 8 or 4,8,16") from None


def _check_outputs(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench needs torch: pip install 'bytesched[torch]'")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'bytesched[report]'")
    for name in ("json", "png", "record"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")


def _report(
    spec: dict[str, Any],
    options: argparse.Namespace,
    argv: Sequence[str] | None,
    circumstances: dict[str, Any],
) -> None:
    result = json.loads(Path(spec["result"]).read_text())
    emulated = spec["kind"] == "emulate"
    name = spec["content"]["name"] if emulated else spec["content"]
    arguments = sys.argv[2:] if argv is None else argv
    result |= {
        "command": shlex.join(["bytesched", "bench", *arguments]),
        "workload": f"{name} (emulated compute)" if emulated else name,
        "emulated": emulated,
        "optimizer": spec["optimizer"],
        "platform": platform.platform(),
        "python": platform.python_version(),
        **circumstances,
    }
    if options.record:
        found = result["compute"].pop("profiles")
        save_all([parse_profile(content, "recorded") for content in found], options.record)
    add_figures(result)
    print(f"\n{table(result)}")
    figures = options.json or spec["result"]
    write_text(Path(figures), json.dumps(result, indent=1) + "\n")
    if options.png:
        draw_bench(figures, options.png)
    for kind in ("record", "json", "png"):
        if getattr(options, kind):
            print(f"{kind}: {getattr(options, kind)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bytesched bench",
        description="Measure data-parallel systems in turn on the same work.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--systems", default=",".join(SYSTEMS), metavar="LIST", help="default: %(default)s")
    add("--model", metavar="NAME", help=f"{', '.join(MODELS)} or module:function (default gpt)")
    shipped = ", ".join(shipped_profiles())
    add("--emulate", metavar="PROFILE", help=f"emulate the compute of {shipped} or FILE.json")
    add("--lab", type=int, metavar="N", help="N emulated hosts on this machine")
    add("--rate", metavar="RATE", help=f"link of each emulated host (default {DEFAULT_RATE})")
    add("--workers", type=int, metavar="N", help="N processes on loopback (default 2)")
    add("--iterations", type=int, default=20, metavar="N", help="timed, per round (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of every system (%(default)s)")
    add("--warmup", type=int, default=5, metavar="N", help="untimed, per round (%(default)s)")
    add("--sweep-iterations", type=int, default=8, metavar="N", help="per setting (%(default)s)")
    add("--servers", type=int, metavar="N", help="ranks that serve; 0: all do (default 1)")
    add("--controller", choices=CONTROLLERS, help=f"of Horovod (default {DEFAULT_CONTROLLER})")
    add(
        "--autotune-iterations",
        type=int,
        default=100,
        metavar="N",
        help="for Horovod's autotuner to settle (%(default)s)",
    )
    add(
        "--batch",
        type=_batches,
        default=[0],
        metavar="N",
        help="of each rank, real models only; several for --record, systems get the largest",
    )
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    add("--compute-scale", type=float, default=1.0, metavar="X", help="emulate a device X x slower")
    add("--comm-ratio", type=float, metavar="X", help="emulate communication of X x compute")
    add("--threads", type=int, default=1, metavar="N", help="of torch per rank; 0: as torch likes")
    add("--timeout-s", type=float, default=300.0, metavar="S", help="for one collective")
    add("--json", metavar="FILE", help="write every figure")
    add("--png", metavar="FILE", help="write a chart")
    add("--record", metavar="FILE", help="write the model's compute profile, at every --batch")
    return parser
