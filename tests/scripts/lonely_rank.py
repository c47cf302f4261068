"""Stands for a rank of a bench: leaves its process id in a folder, then waits; rank 1 fails.

``python -m lonely_rank SPECIFICATION PLACE``
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder, rank = Path(os.environ["LONELY_RANKS"]), json.loads(sys.argv[2])["rank"]
    (folder / f"new{rank}").write_text(str(os.getpid()))
    (folder / f"new{rank}").rename(folder / f"rank{rank}")
    if rank == 1:
        while not (folder / "rank0").exists():
            time.sleep(0.01)
        sys.exit("it has failed")
    time.sleep(600)


if __name__ == "__main__":
    main()
