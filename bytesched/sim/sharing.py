"""What jobs that take turns on shared devices and links would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bytesched.bench.systems import System
from bytesched.link.crossover import SharingJob, bound_share, turn_rates, work
from bytesched.sim.curve import Case

__all__ = ["SHARING_LEGEND", "predict_sharing", "sharing_rows"]

#: what the columns are, for beneath them
SHARING_LEGEND = """
alone: an iteration of each job. in turns: the same while all of them take turns. work: how many
times as much as by one job after the other; jobs that run side by side overlap as well. of the
bound: 100 % if the device or the link is always busy."""


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
