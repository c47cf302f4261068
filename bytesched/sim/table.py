"""What was predicted, of systems and of jobs that share devices and links, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bytesched.bench.systems import System
from bytesched.link.crossover import SharingJob, bound_share, turn_rates, work
from bytesched.sim.curve import Case
from bytesched.sim.predict import Prediction
from bytesched.sim.verdict import rivals

__all__ = ["EXCHANGE_LEGEND", "LEGEND", "SHARING_LEGEND", "predict_sharing", "rows", "sharing_rows"]

_TITLES = ("ranks", "system", "size", "iteration ms", "x T*", "vs best", "collectives")
_EXCHANGE_TITLES = ("p50 ms", "p95 ms")

#: what the columns are, for beneath them
LEGEND = """
size: of DDP's buckets, or of chunks. x T*: over what no schedule can beat.
vs best: how many times as fast as the fastest other system whose predictions were calibrated.
*: not calibrated, that is never held against a measurement, or far from one; no verdict uses it.
collectives: all-reduces, or their halves, of an iteration."""
#: the same for profiles with layers of experts
EXCHANGE_LEGEND = """
size: of DDP's buckets, or of chunks, the largest. x T*: over what no schedule can beat; of
bytesched-pieces, none with all-to-alls in pieces, of the others none with whole ones.
vs best: how many times as fast as the fastest system of DDP's.
collectives: all-reduces, and all-to-alls or their pieces, of an iteration; p50, p95 ms: of these.
*: gradients are not sent, so the link is idle. Ranks are alike."""
#: the same for jobs that share
SHARING_LEGEND = """
alone: an iteration of each job. in turns: the same while all of them take turns. work: how many
times as much as by one job after the other; jobs that run side by side overlap as well. of the
bound: 100 % if the device or the link is always busy."""


def rows(found: Sequence[Sequence[Prediction]]) -> list[tuple[str, ...]]:
    """A row for each system and number of ranks, below the titles."""
    has_exchanges = any(one.exchange_p50_s for of_ranks in found for one in of_ranks)
    titles = _TITLES + _EXCHANGE_TITLES if has_exchanges else _TITLES
    lines: list[tuple[str, ...]] = [titles]
    for of_ranks in found:
        _, peer = rivals(of_ranks)
        for one in of_ranks:
            its = (
                str(one.ranks),
                one.system if one.calibrated else f"{one.system} *",
                one.chosen,
                f"{1e3 * one.iteration_s:.1f}",
                f"{one.to_optimum:.3f}",
                f"{peer.iteration_s / one.iteration_s:.2f}x" if peer else "",
                str(one.collectives),
            )
            lines.append(its + (_exchanges(one) if has_exchanges else ()))
    return lines


def _exchanges(one: Prediction) -> tuple[str, ...]:
    return f"{1e3 * one.exchange_p50_s:.1f}", f"{1e3 * one.exchange_p95_s:.1f}"


def predict_sharing(cases: Sequence[Case]) -> list[SharingJob]:
    """The jobs that train the models of these cases, each with bytesched and alone."""
    found = []
    for case in cases:
        (alone,) = replace(case, systems=(System("bytesched", "bytesched", {}),)).predictions()
        profile = case.model.profile
        found.append(
            SharingJob(
                compute_s=profile.compute_s,
                iteration_s=alone.iteration_s,
                link_s=profile.nbytes / case.fabric.gradient_bytes_per_s,
                optimum_s=alone.optimum_s,
            )
        )
    return found


def sharing_rows(found: Sequence[tuple[int, Sequence[SharingJob]]]) -> list[tuple[str, ...]]:
    """A row for each number of ranks, below the titles."""
    lines: list[tuple[str, ...]] = [
        ("ranks", "alone ms", "one after the other", "in turns", "work", "of the bound")
    ]
    for ranks, jobs in found:
        rates = turn_rates(jobs)
        lines.append(
            (
                str(ranks),
                " / ".join(f"{1e3 * job.iteration_s:.1f}" for job in jobs),
                f"{1e3 * sum(job.iteration_s for job in jobs):.1f}",
                " / ".join(f"{1e3 / rate:.1f}" for rate in rates),
                f"{work(jobs, rates):.2f}x",
                f"{100 * bound_share(jobs, rates):.0f} %",
            )
        )
    return lines
