"""`bytesched bench`: data-parallel systems measured in turn on the same work.

On emulated hosts (``--lab``), as several processes on this machine, or under torchrun on hosts of
one's own. The ranks are processes of their own; this one starts them, waits and reports.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.bench.arguments import (
    CONTROLLERS,
    DEFAULT_RATE,
    DEFAULT_WORKERS,
    bench_parser,
    same_again,
)
from bytesched.bench.compare import check_same, check_systems, load_result, report
from bytesched.bench.gpu_ranks import measure_gpu_ranks
from bytesched.bench.picture import draw_bench
from bytesched.bench.profile import parse_profile, save_all
from bytesched.bench.provenance import command_of, provenance, setting
from bytesched.bench.sharing import measure_sharing
from bytesched.bench.specification import Specification, specification
from bytesched.bench.systems import HOROVOD_SYSTEMS
from bytesched.bench.table import add_figures, table
from bytesched.environment import RankView, rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.ranks import Start, run_all, run_own

WORKER = "bytesched.plugins.bench.worker"
BUSY_LOAD = 1.0
TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when every system was measured, 1 if ``--compare`` finds a regression.

    2 if it cannot compare.
    """
    parser = bench_parser()
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser.parse_args(arguments)
    view = rank_view()
    old: dict[str, Any] | None = None
    try:
        if options.gpu_ranks is not None:
            print("\n".join(["", *measure_gpu_ranks(options, arguments)]))
            return 0
        if options.device or options.trace:
            raise ConfigError("--device and --trace are for --gpu-ranks")
        if options.compare:
            first, *more = options.compare
            if more:
                return _compare_files(first, more)
            old = load_result(Path(first))
            arguments = same_again(old.get("command", ""), arguments)
            options = parser.parse_args(arguments)
        spec = specification(options, view)
        if options.share is not None:
            print("\n".join(["", *measure_sharing(spec, options, arguments)]))
            return 0
        its_setting = setting(options, spec, view)
        if old is not None:
            check_same(old, its_setting)
            check_systems(old, {system.label for system in spec.systems})
    except ConfigError as error:
        parser.error(str(error))
    result = _measured(spec, options, view, provenance(command_of(arguments)), its_setting)
    if result is None or old is None:
        return 0
    try:
        return _compared(old, result)
    except ConfigError as error:
        parser.error(str(error))


def _compare_files(old: str, others: Sequence[str]) -> int:
    """Compare two results that are there; 1 if the second one has a regression."""
    if len(others) > 1:
        raise ConfigError("--compare takes one file, or two: OLD.json NEW.json")
    before, now = load_result(Path(old)), load_result(Path(others[0]))
    check_same(before, now["setting"])
    return _compared(before, now)


def _compared(old: dict[str, Any], new: dict[str, Any]) -> int:
    check_same(old, new["setting"], new.get("network"))
    text, worse = report(old, new)
    print(f"\n{text}")
    return int(bool(worse))


def _measured(
    spec: Specification,
    options: argparse.Namespace,
    view: RankView,
    origin: dict[str, Any],
    its_setting: dict[str, Any],
) -> dict[str, Any] | None:
    """Run every system and report; on rank 0, what was found."""
    launched = view.launcher != "none"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    load = os.getloadavg()[0]
    if load > BUSY_LOAD and not view.rank:
        print(f"this machine is busy (load {load:.1f}): expect noise", file=sys.stderr)
    result: dict[str, Any] | None = None
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
                hosts = options.lab or options.workers or DEFAULT_WORKERS
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
            if spec.is_any_of(HOROVOD_SYSTEMS):
                network += f", Horovod over {CONTROLLERS[spec.controller]}"
            if spec.servers is not None:
                network += f", a store over MPI, served by {spec.servers or 'every'} rank"
                network += "s" if spec.servers > 1 else ""
            circumstances = {
                **origin,
                "setting": its_setting,
                "network": network,
                "load_before": load,
                "stopped": stopped is not None,
            }
            result = _report(spec, start.result, options, circumstances)
    if stopped is not None:
        raise stopped
    return result


def _report(
    spec: Specification,
    found: str,
    options: argparse.Namespace,
    circumstances: dict[str, Any],
) -> dict[str, Any]:
    """Print and write what was found, with what follows from it; returns that."""
    result: dict[str, Any] = json.loads(Path(found).read_text())
    result |= {
        "workload": f"{spec.model} (emulated compute)" if spec.profile else spec.model,
        "emulated": spec.profile is not None,
        "optimizer": spec.optimizer,
        **circumstances,
    }
    if options.record:
        recorded = result["compute"].pop("profiles")
        save_all([parse_profile(content, "recorded") for content in recorded], options.record)
    add_figures(result)
    print(f"\n{table(result)}")
    figures = options.json or found
    write_text(Path(figures), json.dumps(result, indent=1) + "\n")
    if options.png:
        draw_bench(figures, options.png)
    for kind in ("record", "json", "png"):
        if getattr(options, kind):
            print(f"{kind}: {getattr(options, kind)}")
    return result
