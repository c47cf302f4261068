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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NoReturn

from bytesched.bench.compare import check_same, check_systems, load_result, report, same_again
from bytesched.bench.figures import add_figures
from bytesched.bench.gpu_ranks import mps
from bytesched.bench.profile import parse_profile, save_profiles
from bytesched.bench.provenance import command_of, provenance, setting
from bytesched.bench.specification import (
    CONTROLLERS,
    Specification,
    bench_parser,
    specification,
)
from bytesched.bench.systems import HOROVOD_SYSTEMS
from bytesched.bench.table import table
from bytesched.environment import RankView, rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.ranks import RESULT, run_ranks

WORKER = "bytesched.plugins.bench.worker"
GPU_WORKER = "bytesched.plugins.bench.gpu"
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
            if options.compare:
                if len(options.compare) > 2:
                    raise ConfigError("--compare takes one file, or two: OLD.json NEW.json")
                old, *more = (load_result(Path(name)) for name in options.compare)
                if more:
                    return _compared(old, more[0])
                arguments = same_again(old.get("command", ""), arguments)
                options = parser.parse_args(arguments)
            spec = specification(options, view)
            if old is not None:
                check_same(old, setting(spec, view))
                check_systems(old, {system.label for system in spec.systems})
        except ConfigError as error:
            parser.error(str(error))
        result = measure_systems(spec, view, command_of(arguments))
        try:
            return 0 if result is None or old is None else _compared(old, result)
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
    load = os.getloadavg()[0]
    if load > BUSY_LOAD and not view.rank:
        print(f"this machine is busy (load {load:.1f}): expect noise", file=sys.stderr)
    stopped: BaseException | None = None
    shares: AbstractContextManager[tuple[dict[str, str], str]] = nullcontext(({}, ""))
    if spec.gpu_ranks:
        shares = mps()
    with (
        tempfile.TemporaryDirectory(prefix="bytesched-bench-") as folder,
        shares as (variables, sharing),
    ):
        network = "loopback" if view.launcher == "none" else f"ranks started by {view.launcher}"
        if spec.link_rate:
            network = f"links of {spec.link_rate}, if they could be shaped, between emulated hosts"
        try:
            network = run_ranks(
                GPU_WORKER if spec.gpu_ranks else WORKER,
                spec,
                Path(folder),
                view,
                spec.hosts,
                spec.link_rate,
                ranks_per_host=spec.ranks_per_host,
                by_mpi=spec.controller == "mpi" or spec.servers is not None,
                servers=spec.servers or 0,
                variables=variables,
            )
        except (KeyboardInterrupt, SystemExit) as error:
            stopped = error
        # Ranks that end well have left one.
        found = Path(folder, RESULT)
        result: dict[str, Any] | None = None
        if view.rank == 0 and found.exists():
            result = json.loads(found.read_text())
    if stopped is not None and view.rank == 0:
        how_far = "nothing was measured yet" if result is None else "what was measured until then:"
        print(f"\nstopped before the end; {how_far}", flush=True)
    if result is not None:
        result |= {
            "workload": f"{spec.model} (emulated compute)" if spec.profile else spec.model,
            "emulated": spec.profile is not None,
            **origin,
            "network": _described(spec, network, sharing, result),
            "load_before": load,
            "stopped": stopped is not None,
        }
        _report(result, spec)
    if stopped is not None:
        raise stopped
    return result


def _described(spec: Specification, network: str, sharing: str, result: dict[str, Any]) -> str:
    """The network and what carries gradients on it."""
    if spec.gpu_ranks:
        return f"on one device ({result['device']}), {result['carrier']}; processes run {sharing}"
    if spec.is_any_of(HOROVOD_SYSTEMS):
        network += f", Horovod over {CONTROLLERS[spec.controller]}"
    if spec.servers is not None:
        network += f", a store over MPI, served by {spec.servers or 'every'} rank"
        network += "s" if spec.servers > 1 else ""
    return network


def _report(result: dict[str, Any], spec: Specification) -> None:
    """Print and write what was found, with what follows from it, which is added to it."""
    if spec.record:
        recorded = result["compute"].pop("profiles")
        save_profiles([parse_profile(content, "recorded") for content in recorded], spec.record)
        print(f"record: {spec.record}")
    add_figures(result)
    print(f"\n{table(result)}")
    if spec.json:
        write_text(Path(spec.json), json.dumps(result, indent=1) + "\n")
        print(f"json: {spec.json}")
