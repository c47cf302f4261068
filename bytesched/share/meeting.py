"""Where jobs of one machine meet that share a device under one name."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Final

from bytesched.environment import rank_view

__all__ = ["device_folder", "parse_share", "processor"]

_NAME: Final = re.compile(r"[\w.-]{1,80}")
#: in memory, the same for every process of a user, whatever its environment says
_IN_MEMORY: Final = Path("/dev/shm")
#: else; made for this user alone, and refused if it is another one's
_ON_DISK: Final = Path("/tmp")


def parse_share(value: object) -> str:
    """Return a name under which jobs share devices, a folder for that, or nothing."""
    text = value.strip() if isinstance(value, str) else None
    if text is None or (text and not os.path.isabs(text) and not _NAME.fullmatch(text)):
        raise ValueError("neither a name of letters, digits, '.', '_' and '-', nor a whole path")
    return text


def device_folder(share: str, device: str) -> Path:
    """The folder in which jobs queue for ``device``, what is the same for all that share it."""
    if os.path.isabs(share):
        return Path(share, device)
    shared = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else _ON_DISK
    return shared / f"bytesched-{os.getuid()}" / share / device


def processor(rank: int) -> str:
    """The processors of this rank: ranks of other jobs with its number on this host share them."""
    view = rank_view()
    is_known = view.launcher != "none" and view.local_rank >= 0
    return f"{socket.gethostname()}-cpu{view.local_rank if is_known else rank}"
