"""`bytesched doctor --explain`: a script's first steps, and what each of its lines waits for."""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bytesched import log
from bytesched.config import Config, set_on_command_line
from bytesched.doctor.advice import advice_for
from bytesched.environment import rank_view
from bytesched.run.script import loaded
from bytesched.run.watch import watch

_SCRIPT = "bytesched.plugins.script"

#: below this share of all that was waited, a line is not told of
_LEAST = 0.02
_NAMES = 3


def explain(command: Sequence[str], steps: int, tell: Callable[[str], object]) -> None:
    """Run so many steps of a script, unless it ends before; then rank 0 tells what it waited for.

    Args:
        command: the script and its arguments, or ``-m``, a module and its arguments.

    What the script raises is raised again. Raises `OSError` where it cannot be opened.
    """
    # Iterations of plain DDP would wait for other things.
    set_on_command_line({"guard": "off"})
    config, ranks = Config.load(), rank_view()
    # What is printed at the end says more.
    log.show("WARNING" if config.log_level == "INFO" else config.log_level, ranks.rank)
    is_module = command[0] == "-m"
    program, *arguments = command[is_module:]
    run = loaded(program, is_module=is_module)
    begun: list[Any] = []

    def begin(_: object) -> None:
        begun.append(importlib.import_module(f"{_SCRIPT}.explained").begin(steps))

    watch({f"{_SCRIPT}.intercept": begin})
    if ranks.rank == 0:
        # Registered before anything of the script, so called after it.
        atexit.register(_tell, program, begun, tell)
    run(arguments)


def _tell(program: str, begun: Sequence[Any], tell: Callable[[str], object]) -> None:
    if hasattr(sys, "last_value"):
        return
    if not begun:
        tell(
            f"{program}: no DistributedDataParallel and no optimizer of Horovod's was made in this "
            "process; start each rank by itself: torchrun ... -m bytesched doctor --explain ..."
        )
        return
    registry = importlib.import_module("bytesched.plugins.registry")
    left = importlib.import_module("bytesched.plugins.left")
    lines = report(registry.ended(), left.left(), begun[0].waits())
    tell("\n".join([*lines, *(f"\n{verdict}" for verdict in begun[0].verdicts)]))


def report(
    ended: Sequence[Mapping[str, Any]], left: Sequence[str], waits: Sequence[Any]
) -> list[str]:
    """Lines for people.

    Args:
        ended: the figures of what was wrapped.
        left: why models were left as they were.
        waits: of the plugin `explained`, the longest first.
    """
    summary = importlib.import_module("bytesched.plugins.left").summary
    lines = list(summary(ended, left)) or ["the script ended before its second step"]
    iterations = sum(int(figures.get("iterations", 0)) for figures in ended)
    waited_ms = sum(wait.ms for wait in waits)
    reasons = {str(figures["reason"]) for figures in ended if figures.get("reason")}
    # What is said of a line below need not be said twice.
    reasons = {reason for reason in reasons if not any(w.line in reason for w in waits)}
    for wait in waits:
        if wait.ms >= _LEAST * waited_ms and iterations:
            said = _said(wait)
            share = 100 * wait.ms / waited_ms
            lines += [
                "",
                f"{wait.ms / iterations:.1f} ms per iteration, {share:.0f} % of all: {said}",
            ]
            lines += _advised(said)
    for reason in sorted(reasons):
        lines += ["", f"little crossed: {reason}", *_advised(reason)]
    return lines


def _advised(reason: str) -> Iterable[str]:
    advice = advice_for(reason)
    return [f"    why: {advice.happens}", f"    do:  {advice.cure}"] if advice else []


def _said(wait: Any) -> str:
    """A wait in a few words, of the same kind as reasons."""
    who = wait.function or "the script"
    names = sorted(wait.of_ms, key=lambda name: -wait.of_ms[name])
    listed = ", ".join(names[:_NAMES]) + (
        f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    )
    return {
        "norms": f"{who} asks for norms of all gradients ({wait.line})",
        "gradients": f"{who} reads gradients of {listed} ({wait.line})",
        "weights": f"the forward pass uses the weights of {listed} ({wait.line})",
        "parameters": f"{who} uses {listed} right after step() ({wait.line})",
        "step": f"step() updates everything at once ({wait.line})",
        "backward": f"a backward pass begins while the last one is still being sent ({wait.line})",
        "updates": f"{who} needs all weights ({wait.line})",
    }[str(wait.kind)]
