"""What a bench measures apart from systems and numbers of iterations, as its result records it."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from typing import Any, Final

from bytesched.bench.provenance import priority
from bytesched.bench.specification import Specification
from bytesched.bench.systems import HOROVOD_SYSTEMS
from bytesched.environment import RankView

__all__ = ["DEFAULT_RATE", "DEFAULT_WORKERS", "difference", "setting"]

DEFAULT_RATE: Final = "1gbit"
DEFAULT_WORKERS: Final = 2


def setting(options: Namespace, spec: Specification, view: RankView) -> dict[str, Any]:
    """What two results must have in common to be compared."""
    launched = view.launcher != "none"
    ranks = (options.lab or options.workers or DEFAULT_WORKERS) * spec.ranks_per_host
    found: dict[str, Any] = {
        "ranks": view.world_size if launched else ranks,
        "ranks_per_host": spec.ranks_per_host,
        "launcher": view.launcher,
        "rate": (options.rate or DEFAULT_RATE) if options.lab else "",
        "servers": spec.servers,
        "optimizer": spec.optimizer,
        "clip": spec.clip,
        "batch": spec.batch,
        "threads": spec.threads,
        "priority": priority(),
    }
    content: Any = spec.content
    if spec.kind == "emulate":
        text = json.dumps(content["layers"], sort_keys=True).encode()
        found |= {
            "emulate": content["name"],
            "profile": hashlib.sha256(text).hexdigest()[:12],
            "comm_ratio": spec.comm_ratio,
            "compute_scale": spec.compute_scale,
        }
    else:
        found["model"] = content
    if any(system.kind in HOROVOD_SYSTEMS for system in spec.systems):
        found["controller"] = spec.controller
    return found


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first setting that differs, with both values; "" if none does."""
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            return f"{name} was {_shown(old.get(name))} and is {_shown(new.get(name))} now"
    return ""


def _shown(value: object) -> str:
    return "not set" if value in (None, "") else str(value)
