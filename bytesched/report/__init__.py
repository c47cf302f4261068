"""What happened, as pictures: a canvas, the pictures of traces, and the register of all others."""

from __future__ import annotations

from bytesched.report.iteration import draw_iteration
from bytesched.report.pictures import PICTURES, Picture
from bytesched.report.shares import draw_shares
from bytesched.report.timeline import draw_timeline

__all__ = [
    "PICTURES",
    "Picture",
    "draw_iteration",
    "draw_shares",
    "draw_timeline",
]
