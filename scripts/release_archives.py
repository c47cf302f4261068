"""Looks through the sdist and the wheel of a release, and ends with what is wrong, if anything is.

python scripts/release_archives.py VERSION FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: where a folder of the tree is installed
HOMES = {"bytesched": "bytesched", "plugins": "bytesched/plugins", "tuning": "bytesched/tuning"}
LINKS = {"bytesched/plugins", "bytesched/tuning"}
BESIDE = {
    *(".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md"),
    *("hatch_build.py", "pyproject.toml"),
}
INFORMATION = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
NEEDED = {"bytesched/py.typed", "bytesched/plugins/__init__.py", "bytesched/tuning/__init__.py"}


def faults(version: str, folder: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    stem = f"bytesched-{version}"
    tracked = set(_git("ls-files", "--", *HOMES)) - LINKS
    with tarfile.open(folder / f"{stem}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    yield from _differences("sdist", names, tracked | BESIDE)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl") as wheel:
        information = {f"{stem}.dist-info/{name}" for name in INFORMATION}
        modules = {_installed(name) for name in tracked}
        yield from _differences("wheel", set(wheel.namelist()), modules | information)
        yield from (f"the tree has no {name}" for name in sorted(NEEDED - modules))
        yield from _of_metadata(version, wheel.read(f"{stem}.dist-info/METADATA").decode())


def _of_metadata(version: str, text: str) -> Iterator[str]:
    metadata = HeaderParser().parsestr(text)
    if metadata["Version"] != version:
        yield f"METADATA has version {metadata['Version']}, not {version}"
    for name in ("Author", "License-Expression", "Project-URL", "Requires-Python", "Summary"):
        if not metadata[name]:
            yield f"METADATA has no {name}"
    for target in re.findall(r"\]\((?!https://)([^)\s]+)\)", str(metadata.get_payload())):
        yield f"README.md, as an index shows it, links to {target}, which leads nowhere"


def _installed(name: str) -> str:
    folder, _, rest = name.partition("/")
    return f"{HOMES[folder]}/{rest}"


def _differences(archive: str, found: set[str], wanted: set[str]) -> Iterator[str]:
    yield from (f"the {archive} lacks {name}" for name in sorted(wanted - found))
    yield from (f"the {archive} has {name}, which git does not" for name in sorted(found - wanted))


def _git(*arguments: str) -> list[str]:
    run = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.splitlines()


if __name__ == "__main__":
    sys.exit("\n".join(faults(sys.argv[1], Path(sys.argv[2]))) or None)
