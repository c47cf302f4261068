"""The fitted link, and the model of an iteration that ranks settings before any is tried."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_cluster import Cluster, exact_step_s

from bytesched.link.sizes import Probe
from bytesched.tunable import Recording, Send, Setting
from bytesched.tuning.fit import Link, fit_link, fit_probes, with_sends
from bytesched.tuning.model import IterationModel, median_recording, seed_bytes, seeded_space
from bytesched.tuning.space import Limits, Range, Space

KIB = 1024
MIB = 1 << 20


@given(
    overhead_s=st.floats(1e-5, 1e-2),
    bytes_per_s=st.floats(1e6, 1e10),
    seed=st.integers(0, 100),
)
def test_a_line_is_found_among_wild_values(
    overhead_s: float, bytes_per_s: float, seed: int
) -> None:
    link = Link(overhead_s, bytes_per_s)
    sizes = [int(overhead_s * bytes_per_s * ratio) + 16 for ratio in (0.5, 1, 2, 4, 8, 16)]
    samples = [(size, link.seconds(size)) for size in sizes for _ in range(9)]
    wild = random.Random(seed)
    for index in wild.sample(range(len(samples)), 8):
        samples[index] = (samples[index][0], samples[index][1] * wild.uniform(2, 50))
    found = fit_link(samples)
    assert found is not None
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.3)
    assert found.seconds(sizes[3]) == pytest.approx(link.seconds(sizes[3]), rel=0.3)


def test_without_slope_all_time_is_the_bandwidths() -> None:
    assert fit_link([(MIB, 0.01)] * 5) == Link(0.0, MIB / 0.01)
    noise = fit_link([(MIB, 0.02), (2 * MIB, 0.01)])
    assert noise is not None
    assert noise.overhead_s == 0.0
    assert fit_link([]) is None
    assert fit_link([(0, 1.0), (MIB, 0.0), (MIB, float("inf"))]) is None
    with pytest.raises(ValueError, match="no line"):
        fit_probes([])


def test_probes_are_points_of_the_line() -> None:
    link = Link(1e-3, 1e8)
    probes = [Probe(size, size / link.seconds(size)) for size in (MIB // 8, MIB, 4 * MIB)]
    found = fit_probes(probes)
    assert found.overhead_s == pytest.approx(1e-3)
    assert found.bytes_per_s == pytest.approx(1e8)


def sent(link: Link, sizes: list[int], *, window: int) -> list[Send]:
    """Sends one after the other, at most `window` of them on their way."""
    sends: list[Send] = []
    free_s = 0.0
    for index, nbytes in enumerate(sizes):
        start_s = sends[index - window].end_s if index >= window else 0.0
        free_s = max(start_s, free_s) + link.seconds(nbytes)
        sends.append(Send(nbytes, start_s, free_s + link.latency_s))
    return sends


def test_sends_of_several_sizes_make_a_line_of_their_own() -> None:
    probed, real = Link(1e-4, 2e8), Link(5e-4, 1e8)
    sizes = [MIB, MIB // 2, MIB // 8, MIB // 4] * 5
    found = with_sends(probed, sent(real, sizes, window=2))
    assert found.bytes_per_s == pytest.approx(1e8, rel=0.01)
    assert found.overhead_s == pytest.approx(5e-4, rel=0.01)


def test_sends_of_one_size_correct_the_overhead() -> None:
    found = with_sends(Link(1e-4, 1e8), sent(Link(6e-4, 1e8), [MIB] * 9, window=2))
    assert found.bytes_per_s == 1e8
    assert found.overhead_s == pytest.approx(6e-4, rel=0.01)
    assert with_sends(Link(1e-4, 1e8), []) == Link(1e-4, 1e8)


def test_what_a_lonely_send_takes_longer_is_latency() -> None:
    real = Link(2e-4, 1e8, 3e-3)
    sizes = [MIB // 4, MIB] * 6
    first = sent(real, sizes, window=2)
    gap_s = first[-1].end_s + 1.0
    later = [Send(s.nbytes, s.start_s + gap_s, s.end_s + gap_s) for s in first]
    assert with_sends(real, first + later).latency_s == pytest.approx(3e-3, rel=0.5)


@pytest.mark.parametrize(
    ("model", "rate"), [("gpt", 118e6), ("gpt", 1e9), ("vgg", 118e6), ("resnet", 30e6)]
)
def test_the_best_setting_is_among_the_first_trials(model: str, rate: float) -> None:
    """From what a session measures, without trying any."""
    cluster = Cluster(model, Link(4e-4, rate, 8e-4))
    facts = cluster.facts()
    recording = median_recording([cluster.recording(facts.untuned)] * 3)
    assert recording is not None
    link = with_sends(fit_probes(facts.probes), recording.sends)
    space = seeded_space(Limits(), facts, link)
    promising = IterationModel(recording, link).promising(space, facts.untuned)
    assert len(promising) < len(space) or rate == 1e9, "where all is hidden, all are as good"
    first = IterationModel(recording, link).first_trials(promising, 3)
    best_s = cluster.best_step_s(space.settings)
    assert min(exact_step_s(model, cluster.link, setting) for setting in first) <= 1.03 * best_s
    assert cluster.best_step_s(promising.settings) <= 1.005 * best_s


def test_the_seed_is_the_bounds_and_the_box_surrounds_it() -> None:
    cluster = Cluster()
    facts = cluster.facts()
    link = Link(1e-3, 1e8)
    seed = seed_bytes(facts, link)
    assert seed == pytest.approx((1e-3 * 1e8 * facts.model_bytes / 3) ** 0.5, rel=1e-3)
    space = seeded_space(Limits(), facts, link)
    low, high = space.limits.partition
    assert low < facts.untuned.partition_bytes
    assert high > max(seed, facts.untuned.partition_bytes)
    assert high <= 2 * facts.model_bytes
    narrow = seeded_space(Limits(Range(MIB, 2 * MIB)), facts, link)
    assert narrow.limits.partition == Range(MIB, 2 * MIB)


def test_a_tiny_model_has_a_small_space() -> None:
    facts = Cluster().facts(model_bytes=10_000, untuned=Setting(128 * KIB, 256 * KIB))
    space = seeded_space(Limits(), facts, Link(1e-3, 1e8))
    assert space.settings


def test_recordings_are_joined_by_medians() -> None:
    def one(late_s: float, sizes: tuple[int, ...] = (4, 8)) -> Recording:
        return Recording(sizes, (0.2 + late_s, 0.1), (0.05, 0.06), (Send(4, 0.0, 1.0),))

    joined = median_recording([one(0.0), one(5.0), one(0.01), one(0.0, sizes=(1,))][:3])
    assert joined is not None
    assert joined.releases_s == pytest.approx((0.21, 0.1))
    assert len(joined.sends) == 3
    assert median_recording([]) is None


def test_too_many_chunks_are_not_simulated() -> None:
    cluster = Cluster()
    model = IterationModel(cluster.recording(Setting(MIB, MIB)), cluster.link)
    assert model.step_s(Setting(64, 128)) == float("inf")
    assert 0 < model.step_s(Setting(MIB, MIB)) < 2
    assert Space(Limits(Range(MIB, MIB))).settings[0] in model.ranked([Setting(MIB, MIB)])
