"""T* of a chain that waits for all-to-alls: against slices of time in any order, and the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.link.bound import Layer, exchanging_optimum_s, gradients, optimum_s

#: bytes per second, of gradients and of all-to-alls
RATE, EXCHANGE_RATE = 2.0, 4.0
#: of time in the reference; all numbers below are multiples of it
SLICE_S = 0.25
#: chooses among what the link could carry: gradients by layer, and -1, what the chain waits for
Choice = Callable[[Sequence[int]], int]

spans = st.integers(0, 6).map(lambda count: count * SLICE_S)
layers = st.builds(
    Layer,
    forward_s=spans,
    backward_s=spans,
    nbytes=st.integers(0, 8).map(lambda count: count * SLICE_S * RATE),
    exchange_bytes=st.sampled_from([0.0, 0.0, 1, 2, 4]).map(lambda n: n * SLICE_S * EXCHANGE_RATE),
)
chains = st.lists(layers, min_size=1, max_size=6)


def in_slices(chain: Sequence[Layer], choose: Choice) -> float:
    """How long an iteration takes, slice by slice, if the link carries what is chosen."""
    gradients_left = [0] * len(chain)
    #: what is left of it: slices of compute, or of an all-to-all, or a gradient that is needed
    stretches: list[tuple[str, int]] = []

    def slices(span_s: float) -> int:
        return round(span_s / SLICE_S)

    def add(index: int, compute_s: float) -> None:
        exchange = ("exchange", slices(chain[index].exchange_bytes / EXCHANGE_RATE))
        stretches.extend([exchange, ("compute", slices(compute_s)), exchange])

    for index in reversed(range(len(chain))):
        add(index, chain[index].backward_s)
        # Between its compute and the second all-to-all.
        stretches.insert(-1, ("release", index))
    for index, layer in enumerate(chain):
        stretches.append(("need", index))
        add(index, layer.forward_s)
    now = 0
    while stretches:
        kind, count = stretches.pop(0)
        if kind == "release":
            gradients_left[count] = slices(chain[count].nbytes / RATE)
            continue
        if kind == "need" and not gradients_left[count]:
            continue
        if kind in {"compute", "exchange"} and not count:
            continue
        waiting = [index for index, left in enumerate(gradients_left) if left]
        if kind == "exchange":
            waiting.append(-1)
        chosen = choose(waiting) if waiting else None
        if chosen is not None and chosen >= 0:
            gradients_left[chosen] -= 1
        if kind == "need":
            stretches.insert(0, (kind, count))
        elif kind == "compute" or chosen == -1:
            stretches.insert(0, (kind, count - 1))
        else:
            stretches.insert(0, (kind, count))
        now += 1
    return now * SLICE_S


@given(chains)
def test_it_is_what_slices_take_that_serve_the_chain_first_and_then_the_first_layer(
    chain: list[Layer],
) -> None:
    expected = in_slices(chain, min)
    assert exchanging_optimum_s(chain, RATE, EXCHANGE_RATE) == pytest.approx(expected)


@given(chains, st.integers(0, 2**32))
@settings(max_examples=150)
def test_no_order_beats_it(chain: list[Layer], seed: int) -> None:
    taken_s = in_slices(chain, random.Random(seed).choice)
    assert exchanging_optimum_s(chain, RATE, EXCHANGE_RATE) <= taken_s + 1e-9


@given(chains)
def test_without_exchanges_it_is_the_plain_bound(chain: list[Layer]) -> None:
    plain = [Layer(layer.forward_s, layer.backward_s, layer.nbytes) for layer in chain]
    compute_s = sum(layer.forward_s + layer.backward_s for layer in plain)
    expected = optimum_s(gradients(plain), compute_s, RATE)
    for in_pieces in (False, True):
        found = exchanging_optimum_s(plain, RATE, EXCHANGE_RATE, in_pieces=in_pieces, latency_s=1)
        assert found == pytest.approx(expected)


@given(chains, st.floats(0, 0.5))
def test_pieces_and_no_latency_are_never_slower(chain: list[Layer], latency_s: float) -> None:
    whole = exchanging_optimum_s(chain, RATE, EXCHANGE_RATE, latency_s=latency_s)
    cut = exchanging_optimum_s(chain, RATE, EXCHANGE_RATE, latency_s=latency_s, in_pieces=True)
    at_once = exchanging_optimum_s(chain, RATE, EXCHANGE_RATE)
    assert cut <= whole + 1e-9
    assert at_once <= whole + 1e-9


def test_by_hand() -> None:
    """A dense layer, whose gradient takes 8 s, before experts with all-to-alls of 2 s."""
    chain = [Layer(1.0, 3.0, 8 * RATE), Layer(1.0, 1.0, 0.0, 2 * EXCHANGE_RATE)]
    # Backward 5 + 3, the gradient 8, forward 1 + 5.
    assert exchanging_optimum_s(chain, RATE, EXCHANGE_RATE) == 22
    # Experts take as long as the bytes of both all-to-alls: 4 s.
    assert exchanging_optimum_s(chain, RATE, EXCHANGE_RATE, in_pieces=True) == 4 + 3 + 8 + 1 + 4
    # The link is idle for 2 x 0.5 s in each pass of the experts, of which none has the gradient.
    assert exchanging_optimum_s(chain, RATE, EXCHANGE_RATE, latency_s=0.5) == 24


def test_a_link_has_a_rate() -> None:
    with pytest.raises(ValueError, match="a bandwidth is positive"):
        exchanging_optimum_s([Layer(1, 1, 1)], RATE, 0.0)
