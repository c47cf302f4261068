"""What is said of a script at its end: what came of it, and what was left as it was, and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from weakref import WeakKeyDictionary

log = logging.getLogger("bytesched")

#: names of models and stores, with the reason
_left: dict[tuple[str, str], None] = {}


def leave(name: str, why: str, level: int = logging.INFO) -> None:
    """Says, once, why what has this ``name`` is left as it was."""
    if (name, why) not in _left:
        _left[name, why] = None
        log.log(level, "%s: left as it was: %s", name, why)


def left() -> list[str]:
    """All of it, in the order in which it was left."""
    return [f"{name}: {why}" for name, why in _left]


#: of modules in DDP: which one of its class it is
_numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def name_of_ddp(module: object) -> str:
    """What the DDP of ``module`` is called in messages of this rank: as no other one alive."""
    kind = type(module).__name__
    if module not in _numbers:
        taken = {n for other, n in _numbers.items() if type(other).__name__ == kind}
        _numbers[module] = next(number for number in count(1) if number not in taken)
    number = _numbers[module]
    return f"DistributedDataParallel of {kind}" + (f" {number}" if number > 1 else "")


Figures = Mapping[str, int | float | str]


def summary(ended: Sequence[Figures], reasons: Sequence[str]) -> list[str]:
    """A line for each model, with its name where there are several."""
    trained = [figures for figures in ended if figures.get("steps")]
    has_names = len(trained) + len(reasons) > 1
    lines = [
        f"{name}: {_line(figures)}" if has_names else _line(figures)
        for name, figures in zip(_names(trained), trained, strict=True)
    ]
    return [*lines, *(f"mode plain: {why}" for why in reasons)]


def _names(trained: Sequence[Figures]) -> list[str]:
    """The classes of the models, numbered where several have the same."""
    names = [str(figures.get("model", "a model")) for figures in trained]
    often, seen = Counter(names), Counter[str]()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(f"{name} {seen[name]}" if often[name] > 1 else name)
    return numbered


def _line(figures: Figures) -> str:
    compared = str(figures.get("guard", ""))
    ended = f", ended by {figures['error']}" if figures.get("error") else ""
    if figures.get("stood_aside"):
        return f"mode plain: {compared}{ended}"
    parts = [compared] if compared else []
    iterations = int(figures["iterations"])
    comm_ms = float(figures["comm_ms"])
    if iterations and comm_ms:
        hidden_ms = comm_ms * float(figures["overlap_pct"]) / 100
        parts.append(
            f"hid {_ms(hidden_ms)} of {_ms(comm_ms)} ms of communication per iteration "
            f"({figures['overlap_pct']:.0f} %)"
        )
    if iterations:
        parts.append(f"{figures['barrier_crossed_pct']:.0f} % of the bytes crossed the barrier")
        parts.append(f"{iterations} iterations" if iterations > 1 else "1 iteration")
    else:
        parts.append("too short to say what it brought")
    line = f"mode {figures['mode']}: {', '.join(parts)}{ended}"
    reason = figures.get("reason")
    return f"{line}: {reason}" if reason else line


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}"
