"""`bytesched tune`: runs a training that tunes itself, and shows or forgets what was found."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bytesched.config import LEAST_TUNE_STEPS, Config
from bytesched.environment import child_environment
from bytesched.errors import ConfigError
from bytesched.parser import CommandParser
from bytesched.table import aligned
from bytesched.tuning.file import Trial, TuningFile
from bytesched.tuning.launching import runs_bytesched, under_run
from bytesched.tuning.memory import Memory, cache_folder
from bytesched.tuning.online import find_tuner

#: the exit code after a signal is this and its number
KILLED = 128
LOOK_S = 0.25
GRACE_S = 15.0
_EPILOG = """\
The command is the one that starts the training. Its script need not call
bytesched.wrap: it is run by 'bytesched run', where it can be found in the command.

  bytesched tune -- torchrun --nproc-per-node 2 train.py
  bytesched tune --save mine.json --steps 200 -- torchrun ... train.py
  bytesched tune --show
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, or 1 if nothing was adopted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    mine, rest = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        mine, rest = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(mine)
    if options.show:
        return _show()
    if options.forget:
        return _forget(options.forget)
    # What is not given here is as the user has set it elsewhere.
    texts = {"tune_steps": options.steps, "tune_space": options.space, "tune_file": options.save}
    given = {name: text for name, text in texts.items() if text is not None}
    config = Config.load(tune=True, **given)
    if not config.enabled:
        raise ConfigError("enabled is off, so there is nothing to tune: set it to 1, or leave it")
    find_tuner(config)
    if not rest:
        parser.error("nothing to run: bytesched tune -- torchrun ... train.py")
    return _tune(_wrapping(rest), config)


def _wrapping(command: list[str]) -> list[str]:
    """The command under which the script's optimizers are wrapped; says what that is."""
    if runs_bytesched(command):
        return command
    changed = under_run(command)
    if changed is not None:
        print(f"tune: runs {shlex.join(changed)}", file=sys.stderr, flush=True)
        return changed
    print(
        f"tune: no Python script was found in {shlex.join(command)!r}, so nothing is tuned unless "
        "the script calls bytesched.wrap. If it does not, put 'bytesched run' before it where it "
        "is started: torchrun ... -m bytesched run train.py",
        file=sys.stderr,
        flush=True,
    )
    return command


def _tune(command: list[str], config: Config) -> int:
    """Runs `command` until it ends."""
    folder = cache_folder()
    if config.tune_file:
        folder = _checked(Path(config.tune_file).absolute()).parent
    # A file of its own: it always tunes, whatever is known, and replaces that when it is done.
    file = folder / f"running-{os.getpid()}.json"
    file.unlink(missing_ok=True)
    environment = child_environment(
        {
            "BYTESCHED_TUNE": "1",
            "BYTESCHED_TUNE_FILE": str(file),
            "BYTESCHED_TUNE_STEPS": str(config.tune_steps),
            "BYTESCHED_TUNE_SPACE": config.tune_space,
        }
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Without a handler, what was started would go on. What nohup ignores stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(KILLED + number))
    saved: Path | None = None
    try:
        code = _run(command, environment, file, config.tune_steps)
    finally:
        # Also of a training that was interrupted, which is how many end.
        tuning = _read(file)
        file.unlink(missing_ok=True)
        file.with_name(f".{file.name}.lock").unlink(missing_ok=True)
        if tuning is not None and tuning.trials:
            saved = Memory(config.tune_file).save(tuning)
    if tuning is None or tuning.setting is None:
        print(_unfinished(tuning, code, saved), file=sys.stderr)
        return code or 1
    _report(tuning, saved)
    return code


def _checked(file: Path) -> Path:
    """`file` itself. Raises ConfigError if it is no tuning, or cannot be one."""
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no such folder")
    try:
        TuningFile.read(file)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is {error}: name another file") from None
    return file


def _run(command: list[str], environment: dict[str, str], file: Path, steps: int) -> int:
    # A group of its own, so that a launcher ends together with its ranks.
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{command[0]!r} cannot be started: {why}") from None
    shown: TuningFile | None = None
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
            tuning = _read(file)
            if tuning is not None and tuning != shown:
                shown = tuning
                print(f"tune: {tuning.steps} of {steps} steps, {summary(tuning)}", file=sys.stderr)
            if process.returncode is not None:
                return process.returncode
    finally:
        _end(process)


def summary(tuning: TuningFile) -> str:
    """The trials so far in one line."""
    tried = sum(trial.phase == "search" for trial in tuning.trials)
    best, gain_pct = _best(tuning)
    if best is None:
        return "measuring the untuned setting"
    number = f"trial {tried} of about {tried + tuning.more_trials}"
    return f"{number}, best {best.step_ms:.1f} ms, {gain_pct:.1f} % gained: {best.setting}"


def _best(tuning: TuningFile) -> tuple[Trial | None, float]:
    """The fastest trial so far, and what it gains; of the last comparison, none counts."""
    measured = [t for t in tuning.trials if t.step_ms > 0 and t.phase in ("baseline", "search")]
    if not measured:
        return None, 0.0
    best = min(measured, key=lambda trial: trial.step_ms)
    return best, 100 * (1 - best.step_ms / measured[0].step_ms)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what was started, if it still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _read(file: Path) -> TuningFile | None:
    try:
        return TuningFile.read(file)
    except (OSError, ValueError):
        return None


def _unfinished(tuning: TuningFile | None, code: int, saved: Path | None) -> str:
    ended = f"the command ended (exit code {code})"
    if tuning is None:
        return (
            f"tune: {ended} and nothing was tuned: did it train on more than one rank, with a "
            "DistributedDataParallel, Horovod or bytesched.wrap, and with rank 0 on this machine?"
        )
    lines = [f"tune: {ended} before the tuning did, after {tuning.steps} steps"]
    best, gain_pct = _best(tuning)
    if best is not None and gain_pct > 0:
        lines.append(
            f"best so far: {best.setting}, {gain_pct:.1f} % gained; not compared in turns yet"
        )
        lines.append(f"to use it: {replace(tuning, setting=best.setting).paste()}")
    if saved is not None:
        lines.append(_kept(saved))
    return "\n".join(lines)


def _kept(file: Path) -> str:
    known = _read(file)
    if known is not None and known.setting is not None:
        return f"{file} holds a finished tuning and stays as it was: to begin anew, remove it"
    return f"kept in {file} (see bytesched report); let it train longer"


def _report(tuning: TuningFile, file: Path | None) -> None:
    print(f"\nadopted after {tuning.steps} steps: {tuning.setting}")
    rows = [
        ("  tuned", f"{tuning.step_ms:.1f} ms", ""),
        ("  untuned", f"{tuning.untuned_ms:.1f} ms", f"({tuning.untuned})"),
    ]
    if tuning.off_ms > 0:
        rows.append(("  scheduling off", f"{tuning.off_ms:.1f} ms", ""))
    print("\n".join(aligned(rows, "<><")))
    if file is not None:
        own = "" if file.parent == cache_folder() else f" BYTESCHED_TUNE_FILE={file.absolute()}"
        print(f"saved in {file}; the next run with BYTESCHED_TUNE=1{own} begins with it")
    print(f"to use it without tuning:\n  {tuning.paste()}")


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
        usage="bytesched tune [options] -- COMMAND ...",
        description="Find partition and credit sizes for this cluster while a training runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        replaced={"--stop": "the training goes on under what was adopted"},
    )
    add = parser.add_argument
    add("--save", metavar="FILE", help="keep what is found in FILE, not in the user's cache folder")
    add(
        "--steps",
        metavar="N",
        help=f"most steps of a search (at least {LEAST_TUNE_STEPS}; default 150)",
    )
    add("--space", metavar="TEXT", help='where to look, such as "partition_bytes=64KiB..4MiB"')
    add("--show", action="store_true", help="list the tunings that are kept, finished or not")
    add("--forget", default="", metavar="NAME", help="remove one of these, or all")
    return parser
