"""`bytesched tune`: shows or forgets what trainings that tuned themselves have found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bytesched.errors import ConfigError
from bytesched.parser import CommandParser
from bytesched.tuning.file import TuningFile
from bytesched.tuning.memory import Memory, cache_folder

_EPILOG = """\
A training tunes itself, with the setting tune:
  torchrun --nproc-per-node 2 -m bytesched run --tune 1 train.py
"""
_SETTING = "it is a setting of the training: bytesched run --tune 1 --set {}"
_REPLACED = {
    "--save": _SETTING.format("tune_file=FILE"),
    "--space": _SETTING.format("tune_space=TEXT"),
    "--steps": _SETTING.format("tune_steps=N"),
    "--stop": "the training goes on under what was adopted",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when that went well."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    parser = _parser()
    if "--" in arguments:
        parser.error(
            "a training tunes itself now: torchrun ... -m bytesched run --tune 1 train.py, or "
            "BYTESCHED_TUNE=1 before a command whose script calls bytesched.wrap"
        )
    options = parser.parse_args(arguments)
    return _forget(options.forget) if options.forget else _show()


def _show() -> int:
    entries = list(Memory().entries())
    if not entries:
        print(f"nothing is known yet ({cache_folder()})")
    for path, tuning in entries:
        fingerprint = tuning.fingerprint
        ranks = "+".join(map(str, fingerprint.ranks_per_host))
        print(
            f"{path.stem}  {tuning.saved_at[:16]}  {fingerprint.backend}, {ranks} ranks on "
            f"{fingerprint.device}, {fingerprint.bytes_per_s / 1e6:.0f} MB/s, model of "
            f"{fingerprint.model_bytes / 2**20:.1f} MiB\n    {_told(tuning)}"
        )
    return 0


def _told(tuning: TuningFile) -> str:
    if tuning.setting is None:
        return f"unfinished after {tuning.steps} steps"
    return f"{tuning.setting}, {tuning.step_ms:.1f} ms ({tuning.gain_pct:.1f} % gained)"


def _forget(which: str) -> int:
    found = [path for path, _ in Memory().entries() if which in ("all", path.stem)]
    if not found and which != "all":
        raise ConfigError(f"--forget {which}: no such tuning; bytesched tune --show names them")
    for path in found:
        path.unlink(missing_ok=True)
        path.with_name(f".{path.name}.lock").unlink(missing_ok=True)
        print(f"forgotten: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bytesched tune",
        description="Show or forget the sizes that were found for this user's clusters.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        replaced=_REPLACED,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", action="store_true", help="list the tunings, finished or not")
    what.add_argument("--forget", default="", metavar="NAME", help="remove one of these, or all")
    return parser
