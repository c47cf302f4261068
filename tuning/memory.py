"""Tuned settings on disk: a file per cluster and model, found again by what is in it.

Nothing here ends a training: what cannot be read or written is named in a warning and left alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from bytesched.environment import user_cache_folder
from bytesched.files import locked, write_text

from .file import Fingerprint, TuningFile

__all__ = ["Memory", "cache_folder"]

log = logging.getLogger("bytesched")

_LOCK_TIMEOUT_S = 10.0


def cache_folder() -> Path:
    """Where tunings lie if no file is named."""
    return user_cache_folder() / "bytesched" / "tuning"


class Memory:
    """What is known about clusters.

    Args:
        file: reads and writes this file only; empty: a folder with one per fingerprint.
        folder: that folder, if it is not the user's cache folder.
    """

    def __init__(self, file: str | Path = "", *, folder: Path | None = None) -> None:
        self._file = Path(file) if file else None
        self._folder = folder or (cache_folder() if self._file is None else Path())
        self._complained: set[str] = set()
        #: where tunings of this run belong: many files may have to be read to find that out
        self._places: dict[Fingerprint, Path] = {}

    def find(self, fingerprint: Fingerprint) -> tuple[TuningFile | None, list[TuningFile]]:
        """The tuning of this case, if it was finished, and others of the same cluster.

        A link that measured otherwise may be the same one in a noisy moment: where none of the
        tunings of this case had a link like this one, it is that of the nearest rate.
        """
        done = [known for _, known in self.entries() if known.setting is not None]
        case = [known for known in done if known.fingerprint.is_same_case(fingerprint)]
        same = [known for known in case if known.fingerprint.is_same(fingerprint)]
        found = max(same, key=lambda known: known.saved_at, default=None) or min(
            case, key=lambda known: known.fingerprint.ratio_of_rates(fingerprint), default=None
        )
        near = [known for known in done if known.fingerprint.is_same_cluster(fingerprint)]
        return found, [known for known in near if known not in case]

    def entries(self) -> Iterator[tuple[Path, TuningFile]]:
        """Every file that can be read, and what is in it."""
        for path in self._paths():
            try:
                yield path, TuningFile.read(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                self._complain(path, f"is ignored: {error}")

    def path_of(self, fingerprint: Fingerprint) -> Path:
        """Where a tuning of this case belongs."""
        if self._file is not None:
            return self._file
        if fingerprint not in self._places:
            rate = f"{fingerprint.bytes_per_s:.1e}".replace("+", "")
            new = self._folder / f"{fingerprint.name}-{rate}.json"
            same = [path for path, one in self.entries() if one.fingerprint.is_same(fingerprint)]
            self._places[fingerprint] = same[0] if same else new
        return self._places[fingerprint]

    def save(self, tuning: TuningFile) -> Path | None:
        """Writes a tuning in one piece; where it is now, or None if it could not be written.

        A finished tuning is not replaced by one that is still running, be it of another case.
        """
        try:
            path = self.path_of(tuning.fingerprint)
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_name(f".{path.name}.lock"), _LOCK_TIMEOUT_S):
                return path if self._write(path, tuning) else None
        except OSError as error:
            where = self._file or self._folder
            self._complain(where, f"cannot be written: {error.strerror or error}")
        return None

    def _write(self, path: Path, tuning: TuningFile) -> bool:
        try:
            known = TuningFile.read(path)
        except FileNotFoundError:
            pass
        except ValueError as error:
            if self._file is not None:
                # Whatever it is, the user named it and would miss it.
                self._complain(path, f"is left alone: {error}")
                return False
        else:
            if known.setting is not None and tuning.setting is None:
                return True
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        content = json.dumps(replace(tuning, saved_at=now).to_json(), indent=1)
        write_text(path, content + "\n", durable=True)
        return True

    def _paths(self) -> list[Path]:
        if self._file is not None:
            return [self._file]
        try:
            return sorted(self._folder.glob("*.json"))
        except OSError as error:
            self._complain(self._folder, f"cannot be read: {error.strerror or error}")
            return []

    def _complain(self, path: Path, what: str) -> None:
        if (message := f"tuning: {path} {what}") not in self._complained:
            self._complained.add(message)
            log.warning("%s", message)
