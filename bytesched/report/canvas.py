"""The canvas of all pictures: lazily imported matplotlib, one palette, whole files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bytesched.errors import PluginError
from bytesched.files import replacing

INK = "#1f2933"
QUIET = "#7b8794"
GRID = "#e9ecef"
#: Of the systems compared with, and of bytesched.
BEFORE = "#8b98a5"
AFTER = "#3f9b6c"
DOTS_PER_INCH = 180


@contextmanager
def canvas(width_in: float, height_in: float, path: Path) -> Iterator[Any]:
    """Yield an empty figure and write it as PNG, in one piece, if drawing it went well.

    Raises ``PluginError`` if matplotlib is not installed, ``OSError`` if the file cannot be
    written.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PluginError("pictures need matplotlib: pip install 'bytesched[report]'") from error
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(width_in, height_in), facecolor="white")
        yield figure
        with replacing(path) as file:
            # Without the name of the software the file depends on the picture alone.
            figure.savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})


def strip(axes: Any) -> None:
    """Take frame and tick marks off and put the grid behind what is drawn."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelcolor=QUIET, labelsize=9)
    axes.set_axisbelow(True)


def say(
    axes: Any, words: str, at: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Write words so many points right of and above a place, which may lie outside of the axes."""
    beside = {"xytext": offset, "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(words, at, **{"size": 9, **beside, **style})
