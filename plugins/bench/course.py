"""In which order a bench measures its systems, and how long that will take."""

from __future__ import annotations

from collections.abc import Sequence

from bytesched.bench.specification import Specification

__all__ = ["SWEEP_WARMUP", "SWEPT_BUCKETS_MB", "estimate", "first_round"]

SWEPT_BUCKETS_MB = (1, 2, 4, 8, 16, 25)
SWEEP_WARMUP = 2
#: what others are compared with, as it is
_PLAIN = ("ddp", "horovod", "kv-plain")
#: what is swept before it is measured
_SWEPT = ("ddp-best", "horovod-best")


def first_round(kinds: Sequence[str]) -> list[int]:
    """The order of the systems in the first round, by their place among the `kinds`.

    bytesched begins, then what it is compared with as that is; what is swept comes last. So a
    bench that is stopped early has measured what was asked about.
    """

    def eagerness(place: int) -> int:
        kind = kinds[place]
        if kind.startswith("bytesched"):
            return 0
        return 1 if kind in _PLAIN else 2 + (kind in _SWEPT)

    return sorted(range(len(kinds)), key=eagerness)


def estimate(spec: Specification, iteration_s: float) -> str:
    """How long all of it takes, in a line.

    Args:
        iteration_s: of one iteration in which communication hides behind nothing.
    """
    kinds = [system.kind for system in spec.systems]
    # A block ends with one more iteration, whose beginning is the end of the last one timed.
    iterations = len(kinds) * spec.rounds * (spec.warmup + spec.iterations + 1)
    block = SWEEP_WARMUP + spec.sweep_iterations + 1
    iterations += kinds.count("ddp-best") * 2 * len(SWEPT_BUCKETS_MB) * block
    beyond = ", and the sweep of horovod-best" if "horovod-best" in kinds else ""
    return (
        f"estimate: {max(iterations * iteration_s / 60, 0.1):.1f} min, for {iterations} iterations "
        f"of at most {1e3 * iteration_s:.0f} ms{beyond}; ctrl-C ends it and prints the table of "
        "what was measured until then"
    )
