"""`bytesched sim`: what systems would take on a cluster, before anybody pays for it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bytesched.bench.profile import Profile
from bytesched.commands.sim_options import (
    check_outputs,
    climate_of,
    fabric_of,
    given_costs,
    model_of,
    shared_profiles,
    sim_parser,
    systems_of,
)
from bytesched.environment import rank_view
from bytesched.errors import ConfigError, PluginError
from bytesched.files import write_text
from bytesched.lab.hosts import parse_rate
from bytesched.link.algorithms import GLOO_RANKS
from bytesched.sim.curve import AXES, Case, sweep
from bytesched.sim.measure import Links, Measured, measured
from bytesched.sim.picture import draw_map, draw_sweep
from bytesched.sim.systems import Costs
from bytesched.sim.table import (
    EXCHANGE_LEGEND,
    LEGEND,
    SHARING_LEGEND,
    predict_sharing,
    rows,
    sharing_rows,
)
from bytesched.sim.verdict import gain, verdict
from bytesched.table import aligned

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when that went well, 1 if a file cannot be written."""
    parser = sim_parser()
    options = parser.parse_args(argv)
    try:
        check_outputs(options)
        climate, model = climate_of(options), model_of(options)
        options.sharing = shared_profiles(options, model.profile)
        systems = systems_of(options, has_experts=bool(model.profile.exchanged_bytes))
        links = Links(parse_rate(options.bandwidth) / 8, options.latency_us / 1e6, "")
    except (ConfigError, PluginError) as error:
        parser.error(str(error))
    facts: Measured | None = None
    if options.measure:
        found = measured(rank_view())
        if found is None:
            return 0
        facts, origin = found
        links = Links.of(facts, origin)
        model = replace(model, costs=given_costs(facts.costs(model.costs), options))
    cases = [
        Case(model, fabric_of(options, links, ranks), systems, climate, options.iterations)
        for ranks in options.ranks
    ]
    print("\n".join(_headline(cases[0], links)))
    print()
    if options.share is not None:
        predictions = _sharing(cases, options.sharing)
    elif options.curve:
        predictions = _curve(cases[0], options)
    else:
        predictions = _table(cases)
        if options.png:
            draw_map(cases[0], Path(options.png))
    if options.json:
        content = {
            "profile": options.profile,
            "clip": options.clip,
            "link": _link(cases[0], links),
            "costs": _finite(asdict(model.costs)),
            "measured": facts and asdict(facts),
            "predictions": predictions,
        }
        write_text(Path(options.json), json.dumps(content, indent=1) + "\n")
    for kind in ("json", "png"):
        if getattr(options, kind):
            print(f"{kind}: {getattr(options, kind)}")
    return 0


def _finite(content: dict[str, Any]) -> dict[str, Any]:
    """The same with None for what has no limit, as JSON has no infinity."""
    return {
        name: _finite(value) if isinstance(value, dict) else None if math.isinf(value) else value
        for name, value in content.items()
    }


def _table(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Print the systems of every case, and the sentences."""
    found = [case.predictions() for case in cases]
    lines = rows(found)
    print("\n".join(aligned(lines, "><<" + (len(lines[0]) - 3) * ">")))
    has_exchanges = bool(cases[0].model.profile.exchanged_bytes)
    print(f"{EXCHANGE_LEGEND if has_exchanges else LEGEND}\n")
    for case, of_case in zip(cases, found, strict=True):
        print(verdict(case, of_case))
    return [one.to_json() for of_case in found for one in of_case]


def _sharing(cases: Sequence[Case], profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Print what jobs of these profiles take, of which that of the cases is the first."""
    found = []
    for case in cases:
        models = [case.model, *(replace(case.model, profile=profile) for profile in profiles)]
        jobs = predict_sharing([replace(case, model=model) for model in models])
        found.append((case.fabric.ranks, jobs))
    lines = sharing_rows(found)
    print("\n".join(aligned(lines, ">" * len(lines[0]))))
    print(SHARING_LEGEND)
    return [{"ranks": ranks, "jobs": [asdict(job) for job in jobs]} for ranks, jobs in found]


def _curve(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the systems along an axis."""
    axis = AXES[options.curve]
    found = sweep(case, axis)
    titles = (axis.title, *(system.label for system in case.systems), "vs best")
    lines = [titles]
    for point, of_point in found:
        cells = (f"{one.to_optimum:.3f}" for one in of_point)
        lines.append((f"{point:g}", *cells, f"{gain(of_point):.2f}x"))
    print("\n".join(aligned(lines, ">" * len(titles))))
    print("multiples of T*; vs best: how many times as fast as the best of the others ours is")
    if options.png:
        draw_sweep(case, axis, found, Path(options.png))
    return [{"at": point} | one.to_json() for point, of_point in found for one in of_point]


def _headline(case: Case, links: Links) -> list[str]:
    model, profile = case.model, case.model.profile
    spread = case.climate.jitter
    return [
        f"{profile.name}: {profile.nbytes / 1e6:.1f} MB of gradients in "
        f"{len(model.tensors())} tensors, compute {1e3 * profile.compute_s:.1f} ms"
        f"{', clipped' if model.clip else ''}; {len(case.paces)} iterations"
        f"{f', jitter {100 * spread:.2g} %' if spread else ''}",
        f"{_link(case, links)}",
        f"assumed: an update of {1e3 * model.update_s(profile.nbytes):.1f} ms",
        *_processors(model.costs, links),
    ]


def _processors(costs: Costs, links: Links) -> list[str]:
    """What ranks compute and send with; nothing where cores are no limit."""
    cores = costs.cores.per_rank
    if math.isinf(cores):
        return []
    each = (
        f"{name} {1e6 * cpu.message_s:.3g} us a message, {1e6 * cpu.tensor_s:.3g} us a tensor, "
        f"{1e9 * cpu.byte_s:.3g} ms a MB"
        for name, cpu in (("bytesched", costs.scheduled), ("the others", costs.plain))
    )
    return [
        f"{cores:.3g} cores for each rank, of which the model keeps {costs.cpu_load:.2g} busy; CPU "
        f"time, {'measured' if links.origin else 'assumed'}: {'; '.join(each)}"
    ]


def _link(case: Case, links: Links) -> str:
    fabric = case.fabric
    overlap = "hides" if fabric.overlaps else "does not hide"
    return (
        f"{f'measured ({links.origin})' if links.origin else 'assumed'}: "
        f"{8e-9 * links.bytes_per_s:.4g} Gbit/s in either direction of every rank, "
        f"{1e6 * links.latency_s:.4g} us a message; "
        f"{_RUNNING.get(fabric.algorithm, fabric.algorithm)}, of which the start {overlap} behind "
        "the collective before it"
    )


#: what the algorithm of a fabric is called
_RUNNING = {
    "auto": f"ring up to {GLOO_RANKS} ranks as in Gloo, then doubling or halving by size as in MPI",
    "gloo": "ring, which is all that Gloo has",
    "mpi": "doubling or halving by size, as in MPI",
    "nccl": "ring or trees by size, as in NCCL",
}
