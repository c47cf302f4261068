"""Round: in whatever order events come, gradients are summed, then applied, and nothing hangs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bytesched.errors import InvalidTransition
from bytesched.round import (
    OUTSTANDING,
    TO_COME,
    UNTAKEN,
    Bundle,
    BundleState,
    Gradient,
    GradientState,
    Round,
)
from bytesched.task import CommTask, TaskState


@dataclass(frozen=True, eq=False)
class Job:
    slots: list[Gradient]


class Model:
    """Gradients in a row, cut into chunks anywhere, in bundles as a plan makes them."""

    def __init__(self, sizes: list[int], chunk_size: int) -> None:
        self.gradients = [Gradient(f"p{n}") for n in range(len(sizes))]
        self.chunks: list[CommTask] = []
        gradients_of: list[list[Gradient]] = []
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        for start in range(0, ends[-1], chunk_size):
            stop = min(start + chunk_size, ends[-1])
            chunk = CommTask(f"c{len(self.chunks)}", start_at=start, stop_at=stop)
            chunk.index = len(self.chunks)
            inside = [
                gradient
                for gradient, size, end in zip(self.gradients, sizes, ends, strict=True)
                if end - size < stop and end > start
            ]
            members = tuple(CommTask(g.name, start_at=0, stop_at=1) for g in inside)
            chunk.members, chunk.missing = members, len(inside)
            for gradient in inside:
                gradient.chunks.append(chunk)
            self.chunks.append(chunk)
            gradients_of.append(inside)
        by_last: dict[int, list[Gradient]] = {}
        for gradient in self.gradients:
            by_last.setdefault(gradient.chunks[-1].index, []).append(gradient)
        self.bundles: list[Bundle[Gradient, Job]] = []
        bundles_of: list[list[Bundle[Gradient, Job]]] = [[] for _ in self.chunks]
        for slots in by_last.values():
            chunks = {chunk for gradient in slots for chunk in gradient.chunks}
            bundle: Bundle[Gradient, Job] = Bundle(len(self.bundles), slots, chunks, len(slots))
            self.bundles.append(bundle)
            for chunk in chunks:
                bundles_of[chunk.index].append(bundle)
        self.round: Round[Gradient, Job] = Round(self.gradients)
        self.round.cut(self.chunks, gradients_of, self.bundles, bundles_of)

    def bundle_of(self, gradient: Gradient) -> Bundle[Gradient, Job]:
        return next(bundle for bundle in self.bundles if gradient in bundle.slots)


class Training(RuleBasedStateMachine):
    """A script with two optimizers, a wire and an updater, each of which goes on when it likes."""

    @initialize(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
        chunk_size=st.integers(1, 12),
        data=st.data(),
    )
    def begin(self, sizes: list[int], chunk_size: int, data: st.DataObject) -> None:
        self.model = Model(sizes, chunk_size)
        self.round = self.model.round
        self.optimizers = [data.draw(st.integers(0, 1)) for _ in self.model.gradients]
        self.wire: list[CommTask] = []
        self.pushed: list[Bundle[Gradient, Job]] = []
        self.updating: tuple[list[Bundle[Gradient, Job]], list[Gradient]] | None = None
        #: how often each gradient has been used in its round, and the rounds
        self.used: dict[Gradient, int] = {}
        #: gradients whose sums are in the arena
        self.summed: set[Gradient] = set()

    # -- the script --------------------------------------------------------------------

    def _waits_for_the_last_round(self) -> None:
        """As a shell waits before a round: the wire and the updater go on, the script does not."""
        self.drain()

    @rule(count=st.integers(1, 9), data=st.data())
    def backward_computes_some(self, count: int, data: st.DataObject) -> None:
        if not self.round.is_open:
            self._waits_for_the_last_round()
            self.round.begin()
            self.used.clear()
            self.summed.clear()
        waiting = [g for g in self.model.gradients if g.state is GradientState.AWAITED]
        for gradient in data.draw(st.permutations(waiting))[:count]:
            self.wire += self.round.gradient(gradient)

    @precondition(lambda self: self.round.is_open)
    @rule(data=st.data())
    def backward_ends(self, data: st.DataObject) -> None:
        absentees = self.round.absentees()
        for gradient in absentees:
            self.wire += self.round.absent(gradient)
        if data.draw(st.booleans()):
            self.deliver()
        self.round.found({gradient: data.draw(st.booleans()) for gradient in absentees})
        self.round.end()
        assert not any(g.state in TO_COME | {GradientState.ABSENT} for g in self.model.gradients)

    @precondition(lambda self: not self.round.is_open)
    @rule(
        optimizer=st.integers(0, 1),
        kind=st.sampled_from(["armed", "armed", "armed", "at once"]),
    )
    def step(self, optimizer: int, kind: str) -> None:
        mine = [
            g
            for g, of in zip(self.model.gradients, self.optimizers, strict=True)
            if of == optimizer
        ]
        if kind == "at once":
            self.drain()
            self.round.step(mine)
            return
        jobs: dict[Bundle[Gradient, Job], list[Job]] = {}
        for gradient in mine:
            if gradient.state in UNTAKEN:
                bundle = self.model.bundle_of(gradient)
                jobs.setdefault(bundle, [Job([])])[0].slots.append(gradient)
        ready, _ = self.round.arm(jobs)
        self.pushed += ready
        assert all(bundle.is_outstanding for bundle in jobs)
        self.fork()

    @rule(data=st.data())
    def a_parameter_is_read(self, data: st.DataObject) -> None:
        bundle = data.draw(st.sampled_from(self.model.bundles))
        if bundle.state in OUTSTANDING:
            self.drain()
        if bundle.state is BundleState.APPLIED:
            self.round.use(bundle)
        assert bundle.state is BundleState.FREE
        assert not any(gradient.state is GradientState.UNREAD for gradient in bundle.slots)

    # -- the wire and the updater ------------------------------------------------------

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def a_chunk_is_summed(self, data: st.DataObject) -> None:
        self._sum(data.draw(st.sampled_from(self.wire)))

    def _sum(self, chunk: CommTask) -> None:
        self.wire.remove(chunk)
        chunk.start()
        chunk.notify_finish()
        chunk.rearm()
        ready = self.round.summed(chunk)
        for gradient in self.model.gradients:
            if not self.round.sums(gradient.chunks):
                self.summed.add(gradient)
        for bundle in ready:
            assert not self.round.sums(bundle.chunks)
            assert bundle.jobs
        # Twice: what is left in the queue meets the bundle again in a later round.
        self.pushed += [*ready, *ready]

    @precondition(lambda self: self.pushed and self.updating is None)
    @rule(data=st.data())
    def an_update_begins(self, data: st.DataObject) -> None:
        bundle = data.draw(st.sampled_from(self.pushed))
        self.pushed.remove(bundle)
        jobs = self.round.take(bundle)
        assert not (jobs and self.round.sums(bundle.chunks))
        if jobs:
            self.updating = [bundle], [gradient for job in jobs for gradient in job.slots]

    @precondition(lambda self: self.updating is not None)
    @rule()
    def an_update_ends(self) -> None:
        assert self.updating is not None
        (bundles, gradients), self.updating = self.updating, None
        # Nothing is applied, and its memory given away, while it travels.
        assert not any(self.round.sums(gradient.chunks) for gradient in gradients)
        self.round.updated(bundles, gradients)

    def deliver(self) -> None:
        while self.wire:
            self._sum(self.wire[0])

    def drain(self) -> None:
        """The script waits; all else goes on until nothing can."""
        self.deliver()
        # What was pushed twice may stay there, as in an updater's queue.
        while any(bundle.is_outstanding for bundle in self.model.bundles):
            if self.updating is None:
                assert self.pushed, "nobody is to do what is outstanding"
                bundle = self.pushed.pop(0)
                jobs = self.round.take(bundle)
                if not jobs:
                    continue
                self.updating = [bundle], [g for job in jobs for g in job.slots]
            self.an_update_ends()
        assert not any(bundle.is_outstanding for bundle in self.model.bundles)
        if not self.round.is_open:
            assert not self.round.unsummed
            assert not any(g.state in {GradientState.ARMED, GradientState.DUE} for g in self.all)

    @property
    def all(self) -> list[Gradient]:
        return self.model.gradients

    # -- what must always be true ------------------------------------------------------

    def fork(self) -> None:
        """A child would find what is under way lost, and no round could begin on it."""
        child = copy.deepcopy(self.round)
        under_way = {g.name for g in self.all if self.round.sums(g.chunks)}
        stale = {g.name for b in self.model.bundles if b.is_outstanding for g in b.slots}
        if self.round.unsummed:
            with pytest.raises(InvalidTransition):
                child.begin()
        lost, never = child.fork()
        assert under_way == {gradient.name for gradient in lost}
        assert stale == {gradient.name for gradient in never}
        assert all(gradient.state is GradientState.LOST for gradient in lost)

    @invariant()
    def is_valid(self) -> None:
        self.round.validate()
        assert all(chunk.state in {TaskState.READY} for chunk in self.wire)

    def teardown(self) -> None:
        if not hasattr(self, "round"):
            return
        if self.round.is_open:
            for gradient in self.round.absentees():
                self.wire += self.round.absent(gradient)
            self.round.found({g: True for g in self.all if g.state is GradientState.ABSENT})
            self.round.end()
        self.drain()


TestTraining: Any = Training.TestCase
TestTraining.settings = settings(max_examples=100, stateful_step_count=40)


def one() -> Model:
    model = Model([1], 1)
    model.round.begin()
    return model


def test_a_refusal_names_state_and_event() -> None:
    model = one()
    model.round.gradient(model.gradients[0])
    with pytest.raises(InvalidTransition, match=r"'gradient' on <Gradient p0 travelling>"):
        model.round.gradient(model.gradients[0])


def test_nothing_is_summed_that_was_not_sent() -> None:
    model = one()
    with pytest.raises(InvalidTransition, match=r"'sum' on <Gradient p0 awaited>"):
        model.round.summed(model.chunks[0])
    with pytest.raises(InvalidTransition, match=r"'summed' of .* which is not on its way"):
        model.round.summed(model.chunks[0])


def test_a_parameter_that_nothing_has_read_gets_no_gradient() -> None:
    model = one()
    [gradient], [bundle], [chunk] = model.gradients, model.bundles, model.chunks
    model.round.gradient(gradient)
    model.round.end()
    assert model.round.arm({bundle: [Job([gradient])]}) == ([], bundle.nbytes)
    assert model.round.summed(chunk) == [bundle]
    [job] = model.round.take(bundle)
    model.round.updated([bundle], job.slots)
    model.round.begin()
    assert gradient.state.value == "unread"
    with pytest.raises(InvalidTransition, match=r"'gradient' on <Gradient p0 unread>"):
        model.round.gradient(gradient)
    model.round.use(bundle)
    assert gradient.state.value == "awaited"


def test_what_is_armed_while_the_bundle_is_updated_comes_next() -> None:
    model = Model([1, 1], 2)
    first, second = model.gradients
    [bundle], [chunk] = model.bundles, model.chunks
    model.round.begin()
    for gradient in model.gradients:
        model.round.gradient(gradient)
    model.round.end()
    model.round.summed(chunk)
    assert model.round.arm({bundle: [Job([first])]})[0] == [bundle]
    model.round.take(bundle)
    assert model.round.arm({bundle: [Job([second])]})[0] == [bundle]
    model.round.updated([bundle], [first])
    assert [gradient.state.value for gradient in model.gradients] == ["applied", "due"]
    [job] = model.round.take(bundle)
    model.round.updated([bundle], job.slots)
    assert bundle.state is BundleState.APPLIED


def test_what_was_pushed_for_an_earlier_round_takes_nothing_before_it_is_summed() -> None:
    model = one()
    [gradient], [bundle], [chunk] = model.gradients, model.bundles, model.chunks
    model.round.gradient(gradient)
    model.round.arm({bundle: [Job([gradient])]})
    assert model.round.take(bundle) == []
    assert model.round.summed(chunk) == [bundle]
    assert model.round.take(bundle) != []


def test_the_story_counts_states() -> None:
    model = Model([1, 1, 1], 1)
    model.round.begin()
    model.round.gradient(model.gradients[2])
    assert model.round.story() == "  gradients: 2 awaited, 1 travelling\n  updates: 3 free"
