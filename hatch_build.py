"""README.md as package indexes show it: they have no folder that its links could lead to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "bytesched/bytesched"
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Puts the repository, as it was at the tag of the version, in front of relative links."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        [version] = re.findall(
            r'^__version__ = "(.*)"$', (root / "bytesched" / "version.py").read_text(), re.MULTILINE
        )
        text = absolute((root / "README.md").read_text(), f"v{version}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, tag: str) -> str:
    """Markdown whose links and images lead into the repository at ``tag``."""
    places = {
        "": f"https://github.com/{REPOSITORY}/blob/{tag}",
        "!": f"https://raw.githubusercontent.com/{REPOSITORY}/{tag}",
    }
    return LINK.sub(lambda found: f"{found[1]}[{found[2]}]({places[found[1]]}/{found[3]})", text)
