"""Plans as JSON: what `bytesched burst plan --json` writes and the runtime reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.burst.graph import Chain
from bytesched.errors import ConfigError
from bytesched.records import from_json


@dataclass(frozen=True)
class _Item:
    """A layer, or branches with their lanes and where they are joined."""

    first: int
    width: int
    name: str = ""
    lanes: tuple[int, ...] = ()
    branches: tuple[tuple[_Item, ...], ...] | None = None

    def placed(self) -> Place | PlacedBranches:
        """Raises ``ValueError`` for devices and lanes that cannot be."""
        if self.first < 0 or self.width < 1:
            raise ValueError(f"{self.width} devices from number {self.first} are no devices")
        place = Place(self.first, self.width)
        if self.branches is None:
            return place
        if len(self.lanes) != len(self.branches) or min(self.lanes, default=0) < 0:
            raise ValueError(f"expected a lane for each branch, found {list(self.lanes)}")
        plans = (tuple(item.placed() for item in branch) for branch in self.branches)
        return PlacedBranches(tuple(plans), self.lanes, place)


@dataclass(frozen=True)
class _Written:
    plan: tuple[_Item, ...]


def plan_to_json(chain: Chain, plan: Plan) -> list[dict[str, Any]]:
    """The places of a chain's items, with their names."""
    listed: list[dict[str, Any]] = []
    for item, placed in zip(chain, plan, strict=True):
        end = placed.end
        content: dict[str, Any] = {"name": item.name, "first": end.first, "width": end.width}
        if isinstance(placed, PlacedBranches):
            branches = zip(getattr(item, "branches", ()), placed.branches, strict=True)
            content["lanes"] = list(placed.lanes)
            content["branches"] = [plan_to_json(branch, places) for branch, places in branches]
        listed.append(content)
    return listed


def load_named_plan(path: str | Path) -> list[tuple[str, Place | PlacedBranches]]:
    """The plan in a file with the names of its layers.

    Raises `ConfigError` with what is wrong, and where.
    """
    try:
        content = json.loads(Path(path).read_text())
        its = {"plan": content["plan"]} if isinstance(content, dict) and "plan" in content else {}
        items = from_json(_Written, json.dumps(its)).plan
        return [(item.name, item.placed()) for item in items]
    except OSError as error:
        raise ConfigError(f"plan {path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"plan {path} is not valid JSON: {error}") from None
    except ValueError as error:
        text = str(error).replace(_Written.__name__, "it")
        raise ConfigError(f"plan {path}: {text}") from None
