"""What ranks that share a GPU have measured: a table of systems, and the trace of an iteration."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from bytesched.table import aligned

#: of samples drawn anew, and the share of their ratios that an interval holds
_DRAWS: Final = 2000
_HELD: Final = 0.95
#: the relative difference of losses up to which they are those of one training
_CLOSE: Final = 1e-2
_MIB: Final = 2**20


def report(found: Mapping[str, Any]) -> list[str]:
    """The lines of a report: what was measured, a table of systems, traces if there are any."""
    spec, systems = found["specification"], found["systems"]
    bounds = {
        name: statistics.median(turn[name] for turn in found["bounds"])
        for name in found["bounds"][0]
    }
    chunked = {name: ms for name, ms in bounds.items() if name.startswith("both_")}
    best = min(chunked, key=chunked.__getitem__)
    clipped = f", clipped to {spec['clip']:g}" if spec["clip"] else ""
    lines = [
        f"{found['ranks']} ranks on one device ({found['device']}), {found['carrier']}; "
        f"processes run {spec['sharing']}",
        f"{spec['model']}: {found['parameters'] / 1e6:.1f} M parameters in {found['tensors']} "
        f"tensors, batch {found['batch']}, {spec['optimizer']}{clipped}",
        f"compute of all ranks beside each other {bounds['compute']:.1f} ms, one all-reduce of all "
        f"gradients {bounds['reduction']:.1f} ms, "
        f"T* {bounds[best]:.1f} ms (chunks of {best.removeprefix('both_')} MiB)",
        "",
        *_table(systems, bounds[best]),
    ]
    for label, its in systems.items():
        if trace := its["rounds"][-1].get("trace"):
            lines += ["", f"an iteration of {label}, ms from the start of backward"]
            lines += trace_lines(trace)
    return lines


def _table(systems: Mapping[str, Any], optimum_ms: float) -> list[str]:
    times = {
        label: [turn["iteration_ms"] for turn in its["rounds"]] for label, its in systems.items()
    }
    medians = {label: statistics.median(chain(*rounds)) for label, rounds in times.items()}
    peers = [label for label in medians if not label.startswith("bytesched")]
    best = min(peers, key=medians.__getitem__, default="")
    plain = next((label for label in systems if label.startswith("ddp")), next(iter(systems)))
    rows = [["system", "iteration ms", "of T*", "speed", "95 %", "CPU ms", "peak MiB", "losses"]]
    for label, its in systems.items():
        speed = within = "-"
        if best:
            speed = f"{medians[best] / medians[label]:.3f}x"
        if best not in ("", label):
            within = "{:.3f}-{:.3f}".format(*interval(times[best], times[label]))
        took = f"{medians[label]:.2f}", f"{medians[label] / optimum_ms:.3f}x"
        cpu_ms = statistics.median(turn["cpu_ms"] for turn in its["rounds"])
        peak = max(turn["peak_bytes"] for turn in its["rounds"]) / _MIB
        losses = agreement(systems[plain]["losses"], its["losses"])
        rows.append([label, *took, speed, within, f"{cpu_ms:.1f}", f"{peak:.0f}", losses])
    return [
        *aligned(rows, "<>>>>>><"),
        "",
        "iteration: median. T*: all collectives and the compute of an iteration at once.",
        f"speed: how many times as fast as {best or 'the best other'}. CPU: of a rank's threads.",
        f"losses: with deterministic kernels, against those of {plain}.",
    ]


def interval(
    theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Where the ratio of the medians lies, by samples of rounds and of the iterations in them.

    Both were measured in the same rounds, which are drawn in pairs.
    """
    draw = random.Random(0)
    ratios = []
    for _ in range(_DRAWS):
        turns = draw.choices(range(len(ours)), k=len(ours))
        one, other = (
            statistics.median(chain(*(draw.choices(side[t], k=len(side[t])) for t in turns)))
            for side in (theirs, ours)
        )
        ratios.append(one / other)
    ratios.sort()
    outside = round(_DRAWS * (1 - _HELD) / 2)
    return ratios[outside], ratios[-1 - outside]


def agreement(expected: Sequence[Sequence[float]], got: Sequence[Sequence[float]]) -> str:
    """Whether every rank has the same losses, or nearly."""
    if expected == got:
        return "same bits"
    pairs = zip(chain(*expected), chain(*got), strict=True)
    apart = [abs(one - other) / max(abs(one), 1e-12) for one, other in pairs]
    # Of what is no number, nothing is at most anything.
    is_close = all(each <= _CLOSE for each in apart)
    return f"within {max(apart):.0e}" if is_close else f"DIFFER by {max(apart):.0e}"


def trace_lines(trace: Mapping[str, Any]) -> list[str]:
    """The tables of an iteration: its passes, its chunks and its gates."""
    lines = [", ".join(f"{name} {ms:.1f}" for name, ms in trace["passes"])]
    for kind, head in (("chunks", "chunk sent arrived"), ("gates", "gate reached passed")):
        rows = [(name, *(f"{ms:.1f}" for ms in times)) for name, *times in trace[kind]]
        titles = head.split()
        lines += [*aligned([titles, *rows], "<" + ">" * (len(titles) - 1)), ""]
    return lines[:-1]
