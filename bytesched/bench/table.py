"""What `bytesched bench` measured: derived figures, and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any

from bytesched.table import aligned
from bytesched.values import parse_flag


def add_figures(result: dict[str, Any]) -> None:
    """Put the derived figures of every system, and of the run, into the result."""
    systems = result["systems"]
    compute = result["compute"]
    compute["communication_to_compute"] = compute["communication_ms"] / compute["compute_ms"]
    for name, system in systems.items():
        system["figures"] = _figures(name, result)
    for name, system in systems.items():
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
    factor = 2 * (result["world_size"] - 1) / result["world_size"]
    figures = {
        "iteration_ms": median,
        "first_quartile_ms": first,
        "third_quartile_ms": third,
        "to_optimum": median / optimum_ms,
        "bus_mb_per_s": factor * compute["model_bytes"] / median / 1e3,
    }
    for key in ("cpu_ms", "peak_bytes", "state_bytes", "exchange_wait_ms"):
        if all(key in turn for turn in rounds):
            figures[key] = statistics.median(turn[key] for turn in rounds)
    if pieces := compute.get("pieces_optimum_ms"):
        figures |= _exchange_figures(systems, name)
        if name.startswith("bytesched-pieces"):
            figures["to_optimum"] = median / pieces
    if _is_sharded(name):
        figures["to_sharded_optimum"] = median / compute["sharded_optimum_ms"]
    if "nominal_bytes_per_s" in result:
        least_ms = 1e3 * compute["model_bytes"] / result["nominal_bytes_per_s"]
        figures["duplex_share"] = least_ms / median
    plain, best = opponents(name, systems)
    for key, other in (("plain", plain), ("best", best)):
        if other:
            # Of a bench that was stopped, the one may have been measured in more rounds.
            pairs = zip(round_medians(systems[other]), medians, strict=False)
            figures[f"speedup_over_{key}"] = statistics.median(a / b for a, b in pairs)
    if best and not _is_plain(name):
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


def _counts(name: str, system: dict[str, Any]) -> dict[str, int]:
    """What a system that tells it sends; the number of chunks only where their size was given."""
    stats = system["rounds"][-1]["stats"]
    counts = {"bytes": stats["bytes_per_step"]} if "bytes_per_step" in stats else {}
    if counts and "partition_bytes=" in name and "chunks" in stats:
        counts["messages"] = stats["chunks"]
    return counts


def opponents(name: str, systems: dict[str, Any]) -> tuple[str, str]:
    """What a system is compared with: its framework as it is, and at its best; "" if not there.

    Horovod at its best is the fastest of the plain ones that were measured, DDP the fastest of
    those with a bucket that was given or swept; servers at theirs are what P3 makes of them.
    """
    if name.startswith(("kv-", "bytesched-kv")):
        plain, rivals = "kv-plain", [other for other in ("kv-p3",) if other in systems]
    elif not _uses_horovod(name):
        tuned = ("ddp-best", "ddp:", "ddp-own-group")
        plain, rivals = "ddp", [other for other in systems if other.startswith(tuned)]
    else:
        plain = "horovod"
        rivals = [other for other in systems if _uses_horovod(other) and _is_plain(other)]
    best = min(rivals, key=lambda other: statistics.median(_every_ms(systems[other])), default="")
    return plain if plain in systems else "", best


def _is_sharded(name: str) -> bool:
    options = (pair.partition("=") for pair in name.partition(":")[2].split("+"))
    return any(option == "shard" and parse_flag(value) for option, _, value in options)


def _uses_horovod(name: str) -> bool:
    return "horovod" in name.partition(":")[0]


def _is_plain(name: str) -> bool:
    return name.startswith(("ddp", "horovod", "kv-", IDLE))


def _every_ms(system: dict[str, Any]) -> list[float]:
    """The time of every iteration."""
    return [ms for turn in system["rounds"] for ms in turn["iteration_ms"]]


def round_medians(system: dict[str, Any]) -> list[float]:
    """The median time of an iteration in each round, in ms."""
    return [statistics.median(turn["iteration_ms"]) for turn in system["rounds"]]


def _agreement(name: str, systems: dict[str, Any]) -> str:
    """How the losses and weights of a system compare with those of the first one."""
    if name == IDLE:
        return "of its rank alone"
    reference = next(iter(systems.values()))["rounds"][0]
    expected = list(chain(*reference["losses"]))
    rounds = systems[name]["rounds"]
    differences = (
        abs(loss - other) / max(abs(other), 1e-30)
        for turn in rounds
        for loss, other in zip(chain(*turn["losses"]), expected, strict=True)
        if loss != other
    )
    # Where both are infinite or none is a number, it is none.
    worst = max((math.inf if math.isnan(each) else each for each in differences), default=0.0)
    if worst:
        return f"differ by {worst:.1e}"
    same_weights = all(turn["weights"] == reference["weights"] for turn in rounds)
    return "identical" if same_weights else "equal, weights not"


#: the system that sends no gradients
IDLE = "idle"
#: of the cores' busy time; more is told
MOST_STOLEN = 0.02
#: titles, and what is made of a system's figures; "-" where it has none
COLUMNS = {
    "iteration ms": "{iteration_ms:.1f}",
    "quartiles": "{first_quartile_ms:.0f} to {third_quartile_ms:.0f}",
    "x T*": "{to_optimum:.3f}",
    "vs plain": "{speedup_over_plain:.2f}x",
    "vs best": "{speedup_over_best:.2f}x",
    "of gain": "{share_of_possible_gain:.0%}",
    "bus MB/s": "{bus_mb_per_s:.1f}",
    "duplex": "{duplex_share:.0%}",
    "p50 ms": "{exchange_p50_ms:.1f}",
    "p95 ms": "{exchange_p95_ms:.1f}",
    "x idle": "{exchange_p95_to_idle:.2f}x",
    "waits ms": "{exchange_wait_ms:.0f}",
    "CPU ms": "{cpu_ms:.0f}",
    "peak MB": "{peak_mb:.1f}",
    "state MB": "{state_mb:.1f}",
}
OF_EXCHANGES = ("p50 ms", "p95 ms", "x idle", "waits ms")
EXCHANGE_LEGEND = (
    "p50, p95: of all-to-alls of all ranks, from call to end (bytesched-pieces: how long each "
    "piece was waited for); x idle: that p95 over the one where no gradients are sent. waits: how "
    "long an iteration waits for them.",
    "x T* of bytesched-pieces: of the bound for all-to-alls in pieces, of the others: for whole "
    "ones. ddp: all-to-alls in the group of DDP; ddp-own-group: in one of their own.",
    "Links and compute are slower by the same factor than what they stand for, so that the ranks' "
    "traffic leaves the cores of this machine time.",
)


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    systems = result["systems"]
    has_exchanges = any("exchange_p95_ms" in system["figures"] for system in systems.values())
    left_out = {"bus MB/s" if "nominal_bytes_per_s" in result else "duplex"}
    if not has_exchanges:
        left_out.update(OF_EXCHANGES)
    columns = {title: cell for title, cell in COLUMNS.items() if title not in left_out}
    rows = [["system", *columns, "losses"]]
    for name, system in systems.items():
        cells = [_cell(cell, system["figures"]) for cell in columns.values()]
        named = f"{name} ({chosen(system)})" if chosen(system) else name
        rows.append([named, *cells, system["losses"]])
    sides = "<" + len(columns) * ">" + "<"
    lines = [headline(result), *notes(result), "", *aligned(rows, sides), ""]
    lines += [f"{name}: {_own(system)}" for name, system in systems.items() if _own(system)]
    return "\n".join([*lines, *_legend(systems), *(EXCHANGE_LEGEND if has_exchanges else ())])


def _cell(text: str, figures: dict[str, float]) -> str:
    megabytes = {f"{name[:-5]}mb": n / 1e6 for name, n in figures.items() if name.endswith("bytes")}
    try:
        return text.format_map(figures | megabytes)
    except KeyError:
        return "-"


def chosen(system: dict[str, Any]) -> str:
    """The bucket size that the bench found for a system, as text."""
    return f"{system['bucket_mb']:g} MB" if "bucket_mb" in system else ""


def _legend(systems: dict[str, Any]) -> list[str]:
    pairs = dict.fromkeys(opponents(name, systems) for name in systems)
    plain = " or ".join(plain for plain, _ in pairs if plain)
    best = " or ".join(best for _, best in pairs if best)
    lines = []
    if plain:
        lines.append(f"vs plain: how many times faster than {plain}, median over the rounds.")
    if best:
        lines.append(
            f"vs best: the same for {best}. of gain: share of what lies between that and T*."
        )
    first = next(iter(systems))
    if any("duplex_share" in system["figures"] for system in systems.values()):
        lines.append(
            "T*: of a push and a pull pipe in series. duplex: bytes of the busiest link in both "
            "directions, over what its rate could carry in that time."
        )
    return [
        *lines,
        "CPU ms: of one rank per iteration. peak MB: the most memory that training took on a rank; "
        "state MB: of its optimizer's state.",
        f"losses: every loss and weight compared with {first}.",
    ]


def headline(result: dict[str, Any]) -> str:
    """What was measured on what, in a line."""
    compute, ranks_per_host = result["compute"], result.get("ranks_per_host", 1)
    shared = f", {ranks_per_host} on each host" if ranks_per_host > 1 else ""
    return (
        f"{result['workload']}, {compute['model_bytes'] / 1e6:.1f} MB in {compute['tensors']} "
        f"tensors, {result['world_size']} ranks{shared}, {result['network']}"
    )


def described(result: dict[str, Any]) -> str:
    """When, of which commit and where a result was measured, in a line."""
    machine = result.get("machine", {})
    commit = result.get("commit", "")[:9] or f"version {result.get('version', 'unknown')}"
    if result.get("dirty"):
        commit += " with changes"
    where = f"{machine.get('cores', '?')} x {machine.get('cpu', 'unknown processor')}"
    stolen = f"{100 * result.get('stolen_share', 0.0):.0f} % stolen"
    torch = f"torch {machine.get('torch') or 'unknown'}"
    return ", ".join([result.get("date", "no date"), commit, where, torch, stolen])


def notes(result: dict[str, Any]) -> list[str]:
    """The measured times that T* is made of, and what makes them noise."""
    compute = result["compute"]
    beside = "" if result["emulated"] else " beside traffic"
    stolen = result.get("stolen_share", 0.0)
    lines = [
        f"link {result['gradient_bytes_per_s'] / 1e6:.1f} MB/s of gradients: communication "
        f"{compute['communication_ms']:.1f} ms, {compute['communication_to_compute']:.2f} x "
        "compute",
        f"compute {compute['compute_ms']:.1f} ms{beside} "
        f"({compute['compute_alone_ms']:.1f} alone); "
        f"T* {compute['optimum_ms']:.1f} ms, without the update of {compute['update_ms']:.1f} ms",
    ]
    if "pieces_optimum_ms" in compute:
        lines.append(
            f"all-to-alls {compute['exchange_ms']:.1f} ms, of {result['exchange_each_ms']:.1f} ms "
            f"each on idle links; T* with them in pieces {compute['pieces_optimum_ms']:.1f} ms"
        )
    if stolen > MOST_STOLEN:
        lines.append(
            f"{100 * stolen:.0f}% of the time in which the cores had work was withheld by the host "
            "(steal): compare systems of this run only"
        )
    return lines


def _own(system: dict[str, Any]) -> str:
    """What a system reports of itself, in the last round; empty if it reports nothing."""
    stats = system["rounds"][-1]["stats"]
    if "mode" not in stats:
        return ""
    if "partition_bytes" not in stats:
        return f"mode {stats['mode']}"
    bound = system["figures"].get("to_sharded_optimum")
    sharded = "" if bound is None else f", {bound:.3f} x T* of a sharded update"
    levels = ", sums in two levels" if stats.get("levels", 1) > 1 else ""
    return (
        f"mode {stats['mode']}, order {stats['order']}{levels}, partition "
        f"{stats['partition_bytes'] / 1e6:.2f} MB, credit {stats['credit_bytes'] / 1e6:.2f} MB, "
        f"barrier crossed by {stats['barrier_crossed_pct']:.0f}% of the bytes, waited for "
        f"communication {stats['exposed_comm_ms']:.1f} ms per step{sharded}"
    )
