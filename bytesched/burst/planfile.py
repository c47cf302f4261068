"""Plans as JSON: what `bytesched burst plan --json` writes and the runtime reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.burst.graph import Chain
from bytesched.errors import ConfigError


def plan_to_json(chain: Chain, plan: Plan) -> list[dict[str, Any]]:
    """The places of a chain's items, with their names."""
    listed: list[dict[str, Any]] = []
    for item, placed in zip(chain, plan, strict=True):
        if isinstance(placed, Place):
            listed.append({"name": item.name, "first": placed.first, "width": placed.width})
            continue
        branches = getattr(item, "branches", ())
        listed.append(
            {
                "name": item.name,
                "lanes": list(placed.lanes),
                "first": placed.join.first,
                "width": placed.join.width,
                "branches": [
                    plan_to_json(branch, places)
                    for branch, places in zip(branches, placed.branches, strict=True)
                ],
            }
        )
    return listed


def load_named_plan(path: str | Path) -> list[tuple[str, Place | PlacedBranches]]:
    """The plan in a file with the names of its layers.

    Raises `ConfigError` with what is wrong, and where.
    """
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"plan {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"plan {path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"plan {path}: expected an object, found {type(content).__name__}")
    plan = parse_plan(content.get("plan"), f"plan {path}")
    names = (str(item.get("name", "")) for item in content["plan"])
    return list(zip(names, plan, strict=True))


def parse_plan(content: object, where: str) -> Plan:
    """The plan that decoded JSON describes; `where` is its origin, for errors."""
    if not isinstance(content, list):
        raise ConfigError(f"{where}: expected a list of layers, found {content!r}")
    return tuple(_parse(item, f"{where}, layer {n}") for n, item in enumerate(content))


def _parse(content: object, where: str) -> Place | PlacedBranches:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected an object, found {content!r}")
    first, width = content.get("first"), content.get("width")
    if type(first) is not int or type(width) is not int or first < 0 or width < 1:
        raise ConfigError(f"{where}: {width!r} devices from number {first!r} are no devices")
    place = Place(first, width)
    if "branches" not in content:
        return place
    branches, lanes = content["branches"], content.get("lanes")
    if not (
        isinstance(branches, list)
        and isinstance(lanes, list)
        and len(lanes) == len(branches)
        and all(type(lane) is int and lane >= 0 for lane in lanes)
    ):
        raise ConfigError(f"{where}: expected a lane for each branch, found {lanes!r}")
    plans = (parse_plan(branch, f"{where}, branch {n}") for n, branch in enumerate(branches))
    return PlacedBranches(tuple(plans), tuple(lanes), place)
