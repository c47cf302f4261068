"""What follows from what `bytesched bench` measured: figures of each system."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from bytesched.values import parse_flag

#: the system that sends no gradients
IDLE: Final = "idle"
#: of samples drawn anew, and the share of their ratios that an interval holds
_DRAWS: Final = 2000
_HELD: Final = 0.95


def add_figures(result: dict[str, Any]) -> None:
    """Put the derived figures of every system, and of the run, into the result."""
    systems, compute = result["systems"], result["compute"]
    compute["communication_to_compute"] = compute["communication_ms"] / compute["compute_ms"]
    for name, system in systems.items():
        system["figures"] = _figures(name, result)
        system["losses"] = _agreement(name, systems)
        if counts := _counts(name, system):
            system["counts"] = counts


def _figures(name: str, result: dict[str, Any]) -> dict[str, float]:
    systems, compute = result["systems"], result["compute"]
    rounds = systems[name]["rounds"]
    medians = round_medians(systems[name])
    every = _every_ms(systems[name])
    # Of one value, itself three times.
    first, median, third = statistics.quantiles(
        every * (1 + (len(every) == 1)), n=4, method="inclusive"
    )
    optimum_ms = compute["optimum_ms"]
    figures = {
        "iteration_ms": median,
        "first_quartile_ms": first,
        "third_quartile_ms": third,
        "to_optimum": median / optimum_ms,
    }
    if "nominal_bytes_per_s" in result:
        least_ms = 1e3 * compute["model_bytes"] / result["nominal_bytes_per_s"]
        figures["duplex_share"] = least_ms / median
    else:
        factor = 2 * (result["world_size"] - 1) / result["world_size"]
        figures["bus_mb_per_s"] = factor * compute["model_bytes"] / median / 1e3
    for key in ("cpu_ms", "peak_bytes", "state_bytes", "exchange_wait_ms"):
        if all(key in turn for turn in rounds):
            figures[key] = statistics.median(turn[key] for turn in rounds)
    if pieces := compute.get("pieces_optimum_ms"):
        figures |= _exchange_figures(systems, name)
        if name.startswith("bytesched-pieces"):
            figures["to_optimum"] = median / pieces
    if _is_sharded(name) and "sharded_optimum_ms" in compute:
        figures["to_sharded_optimum"] = median / compute["sharded_optimum_ms"]
    plain, best = opponents(name, systems)
    for key, other in (("plain", plain), ("best", best)):
        if other:
            # Of a bench that was stopped, the one may have been measured in more rounds.
            pairs = zip(round_medians(systems[other]), medians, strict=False)
            figures[f"speedup_over_{key}"] = statistics.median(a / b for a, b in pairs)
    if best not in ("", name) and "device" in result:
        low, high = interval(_rounds_ms(systems[best]), _rounds_ms(systems[name]))
        figures |= {"least_speedup": low, "most_speedup": high}
    if best and not name.startswith(("ddp", "horovod", "kv-", IDLE)):
        theirs = round_medians(systems[best])
        possible_ms = statistics.median(theirs) - optimum_ms
        gain_ms = statistics.median(a - b for a, b in zip(theirs, medians, strict=False))
        if possible_ms > 0:
            figures["share_of_possible_gain"] = gain_ms / possible_ms
    return figures


def _exchange_figures(systems: dict[str, Any], name: str) -> dict[str, float]:
    """Of all-to-alls, or their pieces, of all ranks."""

    def taken_ms(system: str, share: float) -> float:
        rounds = systems[system]["rounds"]
        return percentile([ms for turn in rounds for ms in turn["exchange_ms"]], share)

    figures = {"exchange_p50_ms": taken_ms(name, 0.5), "exchange_p95_ms": taken_ms(name, 0.95)}
    if IDLE in systems and not name.startswith("bytesched-pieces"):
        figures["exchange_p95_to_idle"] = figures["exchange_p95_ms"] / taken_ms(IDLE, 0.95)
    return figures


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def interval(
    theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Where the ratio of the medians lies, by samples of rounds and of the iterations in them.

    Both were measured in the same rounds, which are drawn in pairs.
    """
    draw = random.Random(0)
    rounds = range(min(len(theirs), len(ours)))
    ratios = []
    for _ in range(_DRAWS):
        turns = draw.choices(rounds, k=len(rounds))
        one, other = (
            statistics.median(chain(*(draw.choices(side[t], k=len(side[t])) for t in turns)))
            for side in (theirs, ours)
        )
        ratios.append(one / other)
    ratios.sort()
    outside = round(_DRAWS * (1 - _HELD) / 2)
    return ratios[outside], ratios[-1 - outside]


def _counts(name: str, system: dict[str, Any]) -> dict[str, int]:
    """What a system that tells it sends; the number of chunks only where their size was given."""
    stats = system["rounds"][-1]["stats"]
    counts = {"bytes": stats["bytes_per_step"]} if "bytes_per_step" in stats else {}
    if counts and "partition_bytes=" in name and "chunks" in stats:
        counts["messages"] = stats["chunks"]
    return counts


#: by what a name has in it: a framework as it is, and what it is at its best, the fastest of
_PEERS: Final = {
    "kv": ("kv-plain", ("kv-p3",)),
    "horovod": ("horovod", ("horovod",)),
    "": ("ddp", ("ddp-best", "ddp:", "ddp-own-group", "fsdp2")),
}


def opponents(name: str, systems: dict[str, Any]) -> tuple[str, str]:
    """What a system is compared with: its framework as it is, and at its best; "" if not there."""
    kind = name.partition(":")[0]
    plain, tuned = next(peers for part, peers in _PEERS.items() if part in kind)
    rivals = [other for other in systems if other.startswith(tuned)]
    best = min(rivals, key=lambda other: statistics.median(_every_ms(systems[other])), default="")
    return plain if plain in systems else "", best


def _is_sharded(name: str) -> bool:
    options = (pair.partition("=") for pair in name.partition(":")[2].split("+"))
    return any(option == "shard" and parse_flag(value) for option, _, value in options)


def _rounds_ms(system: dict[str, Any]) -> list[list[float]]:
    """The time of every iteration, by rounds."""
    return [turn["iteration_ms"] for turn in system["rounds"]]


def _every_ms(system: dict[str, Any]) -> list[float]:
    return list(chain(*_rounds_ms(system)))


def round_medians(system: dict[str, Any]) -> list[float]:
    """The median time of an iteration in each round, in ms."""
    return list(map(statistics.median, _rounds_ms(system)))


def _agreement(name: str, systems: dict[str, Any]) -> str:
    """How the losses and weights of a system compare with those of the first one.

    Of all rounds, or of a pass whose kernels give the same bits each time.
    """
    if name == IDLE:
        return "of its rank alone"
    (reference, *_), found = (
        [system["compared"]] if "compared" in system else system["rounds"]
        for system in (next(iter(systems.values())), systems[name])
    )
    expected = list(chain(*reference["losses"]))
    differences = (
        abs(loss - other) / max(abs(other), 1e-30)
        for turn in found
        for loss, other in zip(chain(*turn["losses"]), expected, strict=True)
        if loss != other
    )
    # Where both are infinite or none is a number, it is none.
    worst = max((math.inf if math.isnan(each) else each for each in differences), default=0.0)
    if worst:
        return f"differ by {worst:.1e}"
    same_weights = all(turn["weights"] == reference["weights"] for turn in found)
    return "identical" if same_weights else "equal, weights not"
