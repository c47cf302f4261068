"""`bytesched bench`: data-parallel systems measured in turn on the same work.

On emulated hosts (``--lab``), as several processes on this machine, or under torchrun on hosts of
one's own. The ranks are processes of their own; this one starts them, waits and reports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from bytesched.bench.compare import check_same, check_systems, load_result, report, same_again
from bytesched.bench.gpu_ranks import measure_gpu_ranks
from bytesched.bench.profile import parse_profile, save_all
from bytesched.bench.provenance import command_of, provenance, setting
from bytesched.bench.specification import (
    CONTROLLERS,
    Specification,
    bench_parser,
    specification,
)
from bytesched.bench.systems import HOROVOD_SYSTEMS
from bytesched.bench.table import add_figures, table
from bytesched.environment import RankView, rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.ranks import Start, run_all, run_own

WORKER = "bytesched.plugins.bench.worker"
BUSY_LOAD = 1.0
TERMINATED = 143
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when every system was measured, 1 if ``--compare`` finds a regression.

    2 if it cannot compare.
    """
    parser = bench_parser()
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser.parse_args(arguments)
    view = rank_view()
    old: dict[str, Any] | None = None
    with _stoppable():
        try:
            if options.gpu_ranks is not None:
                print("\n".join(["", *measure_gpu_ranks(options, arguments)]))
                return 0
            if options.device or options.trace:
                raise ConfigError("--device and --trace are for --gpu-ranks")
            if options.compare:
                first, *more = options.compare
                old = load_result(Path(first))
                if more:
                    if len(more) > 1:
                        raise ConfigError("--compare takes one file, or two: OLD.json NEW.json")
                    return _compared(old, load_result(Path(more[0])))
                arguments = same_again(old.get("command", ""), arguments)
                options = parser.parse_args(arguments)
            spec = specification(options, view)
            if old is not None:
                check_same(old, setting(spec, view))
                check_systems(old, {system.label for system in spec.systems})
        except ConfigError as error:
            parser.error(str(error))
        result = measure_systems(spec, view, command_of(arguments))
        if result is None or old is None:
            return 0
        try:
            return _compared(old, result)
        except ConfigError as error:
            parser.error(str(error))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is inside, and a second one does not interrupt that."""

    def stop(number: int, _frame: object) -> NoReturn:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(TERMINATED)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _compared(old: dict[str, Any], new: dict[str, Any]) -> int:
    check_same(old, new["setting"], new.get("network"))
    text, worse = report(old, new)
    print(f"\n{text}")
    return int(bool(worse))


def measure_systems(spec: Specification, view: RankView, command: str) -> dict[str, Any] | None:
    """Run every system and report; on rank 0, what was found."""
    origin = {**provenance(command), "setting": setting(spec, view)}
    launched = view.launcher != "none"
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
        stopped: BaseException | None = None
        try:
            if launched:
                network = run_own(spec, start, view)
            else:
                network = run_all(spec, start, spec.hosts, spec.link_rate, Path(folder))
        except (KeyboardInterrupt, SystemExit) as error:
            stopped = error
            network = f"ranks started by {view.launcher}" if launched else "loopback"
            if spec.link_rate:
                network = (
                    f"links of {spec.link_rate}, if they could be shaped, between emulated hosts"
                )
        # Ranks that end well have left one.
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
            result = {
                **json.loads(Path(start.result).read_text()),
                "workload": f"{spec.model} (emulated compute)" if spec.profile else spec.model,
                "emulated": spec.profile is not None,
                **origin,
                "network": network,
                "load_before": load,
                "stopped": stopped is not None,
            }
            _report(result, spec, start.result)
    if stopped is not None:
        raise stopped
    return result


def _report(result: dict[str, Any], spec: Specification, found: str) -> None:
    """Print and write what was found, with what follows from it, which is added to it."""
    if spec.record:
        recorded = result["compute"].pop("profiles")
        save_all([parse_profile(content, "recorded") for content in recorded], spec.record)
    add_figures(result)
    print(f"\n{table(result)}")
    write_text(Path(spec.json or found), json.dumps(result, indent=1) + "\n")
    for kind in ("record", "json"):
        if path := getattr(spec, kind):
            print(f"{kind}: {path}")
