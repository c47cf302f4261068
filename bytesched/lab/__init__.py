"""Several hosts on one machine, with links of a given rate between them, and ranks on them."""

from __future__ import annotations

from bytesched.lab.hosts import Lab, parse_rate
from bytesched.lab.ranks import BenchError, Place, Start, run_all, run_own

__all__ = [
    "BenchError",
    "Lab",
    "Place",
    "Start",
    "parse_rate",
    "run_all",
    "run_own",
]
