"""Jobs that share devices and links, measured: alone, side by side, and in turns."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from bytesched.bench.profile import load_profile
from bytesched.bench.provenance import measured
from bytesched.bench.specification import Specification, refuse
from bytesched.environment import rank_view
from bytesched.errors import ConfigError
from bytesched.lab.ranks import BenchError
from bytesched.link.crossover import SharingJob, bound_share, turn_rates, work
from bytesched.table import aligned

WORKER: Final = "bytesched.plugins.bench.share_worker"
DDP: Final = "ddp, side by side"
SIDE_BY_SIDE: Final = "side by side"
CROSSOVER: Final = "crossover"
_MOST_JOBS: Final = 8


def _specification(spec: Specification) -> Specification:
    """With the profiles of all jobs, emulated on a device of which each host has one.

    Raises `ConfigError` for what cannot be measured with several jobs.
    """
    if spec.profile is None:
        raise ConfigError("--share emulates the device that jobs share, and needs --emulate")
    if rank_view().launcher != "none":
        raise ConfigError("--share starts the ranks itself: leave the launcher out")
    refuse(spec, "--share", "png", "record", "compare")
    if spec.ranks_per_host > 1:
        raise ConfigError("--share places its ranks itself: leave --ranks-per-host out")
    names = [name for name in spec.share.split(",") if name] or [spec.emulate]
    profiles = (spec.profile, *map(load_profile, names))
    if len(profiles) > _MOST_JOBS:
        raise ConfigError(f"--share {spec.share}: at most {_MOST_JOBS} jobs")
    if spec.iterations < LEAST_ITERATIONS:
        raise ConfigError(
            f"--iterations {spec.iterations}: with --share at least {LEAST_ITERATIONS}"
        )
    if any(profile.exchanged_bytes for profile in profiles):
        raise ConfigError("--share is not for a profile with layers of experts")
    if [system.kind for system in spec.systems] != ["bytesched"]:
        raise ConfigError("--share measures bytesched: --systems bytesched, with options if any")
    return replace(spec, profiles=profiles, ranks_per_host=len(profiles))


def measure_sharing(bench: Specification, arguments: Sequence[str]) -> list[str]:
    """Measure, and write what was found; the lines of a report. Raises `ConfigError`."""
    found = measured(_specification(bench), WORKER, arguments)
    return [_headline(found, bench.hosts), "", *table(found)]


def _headline(found: dict[str, Any], hosts: int) -> str:
    jobs = "; ".join(
        f"{job['name']}: compute {job['compute_ms']:.1f} ms, link {job['link_ms']:.1f} ms, "
        f"alone {job['alone_ms']:.1f} ms, T* {job['optimum_ms']:.1f} ms"
        for job in found["jobs"]
    )
    return (
        f"{len(found['jobs'])} jobs of {hosts} ranks (emulated compute, one device on each host), "
        f"{found['network']}\n{jobs}"
    )


def table(found: dict[str, Any]) -> list[str]:
    """The lines of a table: how fast each job is, how much is done, and how near the bound."""
    names = ("compute_ms", "alone_ms", "link_ms", "optimum_ms")
    jobs = [SharingJob(*(job[name] / 1e3 for name in names)) for job in found["jobs"]]
    serial_s = sum(job.iteration_s for job in jobs)
    #: by the way, rates of the jobs and whether they have the same bits as alone
    ways: dict[str, tuple[Sequence[float], str]] = {
        "one after the other": ([1 / serial_s] * len(jobs), "-")
    }
    for name, turns in found["arms"].items():
        rates = [statistics.median(rates) for rates in zip(*turns["rates"], strict=True)]
        ways[name] = rates, "yes" if turns["same_bits"] else "NO"
    ways["crossover, predicted"] = turn_rates(jobs), "-"
    lines = [["jobs", "iteration ms", "work", "of the bound", "same bits"]]
    for name, (each_rate, bits) in ways.items():
        each = " / ".join(f"{1e3 / rate:.1f}" for rate in each_rate)
        near = f"{100 * bound_share(jobs, each_rate):.1f} %"
        lines.append([name, each, f"{work(jobs, each_rate):.3f}x", near, bits])
    return [
        *aligned(lines, "<>>><"),
        "",
        "iteration: of each job. work: how many times as much as one job after the other.",
        "of the bound: 100 % if the device or the link is always busy, or no job can be faster.",
        "Side by side, jobs get equal shares of the device, without a cost of switching.",
    ]


#: iterations of each job in which those that began at once fall out of step
_SETTLING: Final = 1
#: iterations of each job that a rate is made from
_LEAST: Final = 2
#: of each job, for jobs of one pace that take turns
LEAST_ITERATIONS: Final = _SETTLING + _LEAST + 1


def common_rates(starts_s: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Iterations per second of each job, over one and the same time, in which all of them train.

    Jobs that take turns are half a round apart: of one, six iterations end in the time of five and
    a half of the other. So what is done of an iteration at either end of that time counts too.

    Args:
        starts_s: of each job, when its iterations began, the last one ending at the last of them.

    Raises `BenchError` where that time has fewer than two iterations of a job.
    """
    since_s = max(starts[min(_SETTLING, len(starts) - 1)] for starts in starts_s.values())
    until_s = min(starts[-1] for starts in starts_s.values())
    rates = {}
    for job, starts in starts_s.items():
        done = _done(starts, until_s) - _done(starts, since_s) if since_s < until_s else 0.0
        if done < _LEAST:
            raise BenchError(
                f"job {job} had {done:.1f} iterations while all jobs trained, of the {_LEAST} that "
                "make a rate: their paces differ too much for so few: give more --iterations"
            )
        rates[job] = done / (until_s - since_s)
    return rates


def _done(starts_s: Sequence[float], at_s: float) -> float:
    """Iterations that are done at this moment, between the first and the last of these."""
    steps = list(pairwise(starts_s))
    step = min(max(0, bisect_right(starts_s, at_s) - 1), len(steps) - 1)
    began_s, ended_s = steps[step]
    return step + (at_s - began_s) / (ended_s - began_s)
