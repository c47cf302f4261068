"""Work and links at random, for simulated clusters."""

from __future__ import annotations

from hypothesis import strategies as st

from bytesched.link.cluster import Bundle, Job, Work
from bytesched.link.fabric import ALGORITHMS, LIBRARIES, Fabric

_TIMES_S = st.floats(0.0, 0.1)
_SIZES = st.integers(1, 10**6)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Layers, jobs and bundles in any number; every job is waited for."""
    layers = draw(st.integers(1, 6))
    jobs = [
        Job(draw(_SIZES), draw(st.integers(0, 9)), draw(st.integers(0, layers - 1)))
        for _ in range(draw(st.integers(1, 12)))
    ]
    parts = draw(st.integers(1, 3))
    bundles = [
        Bundle(tuple(range(part, len(jobs), parts)), draw(_TIMES_S)) for part in range(parts)
    ]
    gates = [draw(st.integers(-1, parts - 1)) for _ in range(layers)]
    # The last layer waits for everything, so that nothing is left for the next iteration.
    bundles.append(Bundle(tuple(range(len(jobs))), draw(_TIMES_S)))
    gates[-1] = parts
    return Work(
        forward_s=tuple(draw(_TIMES_S) for _ in range(layers)),
        backward_s=tuple(draw(_TIMES_S) for _ in range(layers)),
        jobs=tuple(jobs),
        bundles=tuple(bundles),
        bundle_of=tuple(gates),
        is_planned=draw(st.booleans()),
        credit_bytes=draw(st.sampled_from((1, 10**6, 1 << 40))),
    )


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    """Links among a few ranks."""
    return Fabric(
        ranks=draw(st.integers(2, 9)),
        bytes_per_s=draw(st.sampled_from((1e6, 1e7, 1e8))),
        latency_s=draw(st.sampled_from((0.0, 1e-3))),
        algorithm=draw(st.sampled_from(sorted({*ALGORITHMS, *LIBRARIES}))),
        delay_s=draw(st.sampled_from((0.0, 1e-3))),
        overlaps=draw(st.booleans()),
    )
