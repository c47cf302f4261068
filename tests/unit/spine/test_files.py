"""Files in one piece: whatever stops a write or lies in its way, no name shows a part."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bytesched.files import locked, read_text, replacing, write_text


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("one", "zwölf\n"):
        write_text(path, text, durable=True)
        assert read_text(path) == text
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_old_content_shows_until_the_new_is_whole_and_stays_where_that_breaks_off(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with suppress(KeyboardInterrupt), replacing(path) as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file that links show, and which nothing changes."""
    file = tmp_path / "precious"
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious"


@pytest.mark.parametrize("name", ["a.json", ".a.json.new"])
def test_a_link_is_not_written_through(name: str, precious: Path, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(precious)
    path = tmp_path / "a.json"
    write_text(path, "new")
    assert not path.is_symlink()
    assert path.read_text() == "new"


def test_a_link_under_the_very_name_is_refused(
    precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f".a.json.{bytes(8).hex()}.new").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "a.json", "new")


def test_the_mode_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    before = os.umask(0o027)
    try:
        write_text(path, "one")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    write_text(path, "two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a pipe"])
def test_what_is_no_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    if kind == "pipe":
        path = tmp_path / "pipe"
    with pytest.raises(OSError, match="not a regular file"), replacing(path):
        pass
    with pytest.raises((ValueError, IsADirectoryError)):
        read_text(path)


def test_text_goes_into_a_pipe_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(path.read_text()), daemon=True)
    reader.start()
    write_text(path, "text")
    reader.join(10)
    assert found == ["text"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_one_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, 0.0), pytest.raises(TimeoutError, match="held"), locked(path, 0.05):
        pass
    with locked(path, 0.0):
        pass


def test_a_link_is_no_lock(precious: Path, tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(OSError, match="lock"), locked(tmp_path / "lock", 0.0):
        pass
