"""`bytesched doctor`: is this machine ready, and if not, what to do about it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from bytesched.config import Config
from bytesched.doctor import checks
from bytesched.doctor import probes as trials
from bytesched.doctor.checks import Check, Status
from bytesched.doctor.explain import explain
from bytesched.parser import CommandParser
from bytesched.table import aligned

_MARKS: dict[Status, str] = {"ok": "ok", "absent": "--", "warn": "warn", "fail": "FAIL"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings and return 0, or 1 when one of them stops training."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.explain is not None and not options.explain:
        parser.error("--explain: which script?")
    if options.explain:
        explain(options.explain, options.steps, print)
        return 0
    if options.config:
        return _print_config(as_json=options.json)
    found = examine(options.timeout)
    well = all(check.status != "fail" for check in found)
    if options.json:
        print(json.dumps({"ok": well, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        print(as_text(found))
    return 0 if well else 1


def examine(timeout_s: float) -> list[Check]:
    """Run every check; no trial takes longer than about `timeout_s`."""
    found = [
        *checks.versions(),
        *checks.optional_packages(),
        *checks.environment(),
        *checks.configuration(),
        *checks.network(),
        *checks.emulated_hosts(),
    ]
    if checks.installed("horovod"):
        found += checks.horovod()
    if any(check.name == "torch" and check.status == "fail" for check in found):
        return found
    found += [*trials.backends(timeout_s), *trials.loopback(timeout_s)]
    if found[-1].status != "fail":
        found += trials.training(timeout_s)
    return found


def as_text(found: Sequence[Check]) -> str:
    """Return the findings as lines that can be pasted into an issue."""
    rows: list[tuple[str, str, str]] = []
    for check in found:
        rows.append((f"[{_MARKS[check.status]}]", check.name, check.detail))
        if check.fix:
            rows.append(("", "", f"fix: {check.fix}"))
    failed = [check.name for check in found if check.status == "fail"]
    end = f"not ready: {', '.join(failed)}" if failed else "ready"
    return "\n".join([*aligned(rows, "<<<"), "", end])


def _print_config(as_json: bool) -> int:
    rows = Config.load().explain()
    if as_json:
        print(
            json.dumps({name: {"value": v, "origin": origin} for name, v, origin in rows}, indent=2)
        )
        return 0
    print("\n".join(aligned([(name, repr(value), origin) for name, value, origin in rows], "<<<")))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bytesched doctor",
        usage="bytesched doctor [--json] [--config] [--timeout S]\n"
        "       bytesched doctor [--steps N] --explain script.py [arguments]",
        description="Check versions, backends, ranks and the network of this machine; or find out "
        "which lines of a training script wait for communication.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--config", action="store_true", help="print the configuration and where each value is from"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="longest time in seconds for anything that runs torch (default: %(default)g)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=30,
        metavar="N",
        help="steps of the script that --explain runs (default: %(default)d)",
    )
    parser.add_argument(
        "--explain",
        nargs=argparse.REMAINDER,
        metavar="script.py",
        help="run a script, or -m and a module, with its arguments; print what its lines wait for, "
        "and what to do. Under a launcher too: torchrun ... -m bytesched doctor --explain train.py",
    )
    return parser
