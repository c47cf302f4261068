"""What `bytesched bench` measured, as text."""

from __future__ import annotations

from typing import Any, Final

from bytesched.bench.figures import opponents
from bytesched.table import aligned

#: of the cores' busy time; more is told
MOST_STOLEN: Final = 0.02
#: titles, and what is made of a system's figures; without those that no system has
COLUMNS: Final = {
    "iteration ms": "{iteration_ms:.1f}",
    "quartiles": "{first_quartile_ms:.0f} to {third_quartile_ms:.0f}",
    "x T*": "{to_optimum:.3f}",
    "vs plain": "{speedup_over_plain:.2f}x",
    "vs best": "{speedup_over_best:.2f}x",
    "95 %": "{least_speedup:.3f} to {most_speedup:.3f}",
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
#: what is said below the table of columns that it has
_LEGEND: Final = {
    "vs plain": "vs plain: how many times faster than {plain}, median over the rounds.",
    "vs best": "vs best: how many times as fast as {best}. of gain: the share of the way to T*.",
    "95 %": "95 %: of ratios to the best by samples of rounds and of iterations. T* was measured: "
    "the collectives and the compute of an iteration side by side.",
    "duplex": "T*: of a push and a pull pipe in series. duplex: bytes of the busiest link in both "
    "directions, over what its rate could carry in that time.",
    "CPU ms": "CPU ms: of one rank per iteration. peak MB: the most memory that training took on a "
    "rank; state MB: of its optimizer's state.",
    "losses": "losses: every loss and weight compared with {first}.",
    "p95 ms": "p50, p95: of all-to-alls of all ranks, from call to end (bytesched-pieces: how long "
    "each piece was waited for); x idle: that p95 over the one where no gradients are sent. "
    "waits: how long an iteration waits for them.\n"
    "x T* of bytesched-pieces: of the bound for all-to-alls in pieces, of the others: for whole "
    "ones. ddp: all-to-alls in the group of DDP; ddp-own-group: in one of their own.\n"
    "Links and compute are slower by the same factor than what they stand for, so that the ranks' "
    "traffic leaves the cores of this machine time.",
}


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    systems = result["systems"]
    columns = [["system", *(_named(*item) for item in systems.items())]]
    for title, cell in COLUMNS.items():
        cells = [_cell(cell, system["figures"]) for system in systems.values()]
        if set(cells) != {"-"}:
            columns.append([title, *cells])
    sides = "<" + (len(columns) - 1) * ">" + "<"
    columns.append(["losses", *(system["losses"] for system in systems.values())])
    rows = list(zip(*columns, strict=True))
    pairs = [opponents(name, systems) for name in systems]
    plain, best = (
        " or ".join(filter(None, dict.fromkeys(names))) for names in zip(*pairs, strict=True)
    )
    names = {"plain": plain, "best": best, "first": next(iter(systems))}
    lines = [headline(result), *notes(result), "", *aligned(rows, sides), ""]
    lines += [f"{name}: {_own(system)}" for name, system in systems.items() if _own(system)]
    lines += [text.format_map(names) for title, text in _LEGEND.items() if title in rows[0]]
    for name, system in systems.items():
        if "trace" in system:
            lines += ["", f"an iteration of {name}, ms from the start of backward"]
            lines += _trace_lines(system["trace"])
    return "\n".join(lines)


def _cell(text: str, figures: dict[str, float]) -> str:
    megabytes = {f"{name[:-5]}mb": n / 1e6 for name, n in figures.items() if name.endswith("bytes")}
    try:
        return text.format_map(figures | megabytes)
    except KeyError:
        return "-"


def _named(name: str, system: dict[str, Any]) -> str:
    return f"{name} ({chosen(system)})" if chosen(system) else name


def chosen(system: dict[str, Any]) -> str:
    """The bucket size that the bench found for a system, as text."""
    return f"{system['bucket_mb']:g} MB" if "bucket_mb" in system else ""


def _trace_lines(trace: dict[str, Any]) -> list[str]:
    """The passes of an iteration, its chunks and its gates."""
    lines = [", ".join(f"{name} {ms:.1f}" for name, ms in trace["passes"])]
    for kind, *titles in (
        ("chunks", "chunk", "sent", "arrived"),
        ("gates", "gate", "reached", "passed"),
    ):
        rows = [[name, *(f"{ms:.1f}" for ms in times)] for name, *times in trace[kind]]
        lines += ["", *aligned([titles, *rows], "<>>")]
    return lines


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
    alone, without = " with the update", ""
    if "update_ms" in compute:
        alone = f"{beside} ({compute['compute_alone_ms']:.1f} alone)"
        without = f", without the update of {compute['update_ms']:.1f} ms"
    lines = [
        f"link {result['gradient_bytes_per_s'] / 1e6:.1f} MB/s of gradients: communication "
        f"{compute['communication_ms']:.1f} ms, {compute['communication_to_compute']:.2f} x "
        "compute",
        f"compute {compute['compute_ms']:.1f} ms{alone}; "
        f"T* {compute['optimum_ms']:.1f} ms{without}",
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
