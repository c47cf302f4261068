"""What a session says and measures of itself: whether the barrier was crossed, at what cost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final

from bytesched.observe import Observers
from bytesched.tunable import Setting

from .causes import Causes

_MS = 1e6
_WORST = 8

#: After so many iterations it is logged, once, if less than this share of the bytes crossed.
_JUDGED_AFTER = 50
_WORTH_IT = 0.02
#: From this share on, nothing has to be explained.
_MUCH = 0.5
#: From this share on, what is left of communication is not worth a word.
_NEARLY_ALL = 0.9
#: From this share on, whoever waits for it is not worth one either.
_ALL = 0.95

_HIDDEN = "communication is hidden behind backward already, there is little to gain"
_ARRIVED = "the rest had arrived before step()"

#: Said as soon as values may be missing: nothing shows it once training goes on.
UNSEEN: Final = (
    "reads of weights and gradients wait for them, except torch.tensor(weight), x.data = weight, "
    "type(weight), C++ code, a GPU stream that is new, kept optimizer state that was loaded or is "
    "from before wrap, and, with AdamA, what else has the memory of weights or "
    "states: call bytesched.flush() before these (docs/reference/limits.md#what-no-read-shows)"
)
#: The same of more than two ranks, where chunks are not DDP's buckets.
ROUNDING: Final = "sums may round as with other buckets than DDP's"

log = logging.getLogger("bytesched")


class Meter:
    """Counts and times; every method costs a clock reading and a few additions.

    Shares and means leave out the warm-up, and begin anew where rounds go another way: what was
    before is no picture of the others.
    """

    def __init__(
        self, observers: Observers, parameters: int, busy_ns: Callable[[], int] = lambda: 0
    ) -> None:
        self._observers = observers
        #: for how long something has been on the wire
        self._busy_ns = busy_ns
        self._parameters = parameters
        #: of the plan, once there is one
        self._nbytes = self._chunks = 0
        self._setting: Setting
        self._forward_ns = self._backward_ns = self._step_ns = 0
        self._crossed_steps = 0
        #: why every step updates everything at once, where that is known from the start
        self.whole_because = ""
        #: why sums of this round were awaited inside backward
        self.landed_because = ""
        self._steps = 0
        #: rounds after the warm-up
        self.rounds = 0
        #: a round has been settled
        self.is_measuring = False
        self._measure()

    def _measure(self) -> None:
        """From here on shares and means are measured."""
        #: no step has taken the current round
        self._is_untaken = False
        #: rounds that a step has taken, those steps, and by the reason those that updated
        #: everything at once
        self._iterations = self._measured_steps = 0
        self._whole_steps: Counter[str] = Counter()
        self._crossed_bytes = 0
        #: by what made the training thread wait for what was on the wire
        self._wait_ns: Counter[str] = Counter()
        self._update_ns = 0
        #: what reads gradients in front of ``step()``
        self.causes = Causes(self._parameters)
        self._busy_before_ns = self._busy_ns() if self.is_measuring else 0

    def active(self, nbytes: int, chunks: int, setting: Setting) -> None:
        """The warm-up is over: so many bytes in so many chunks are sent in each round."""
        self._nbytes = nbytes
        self.changed(chunks, setting)

    def changed(self, chunks: int, setting: Setting) -> None:
        """There are other sizes from now on."""
        self._chunks = chunks
        self._setting = setting

    def forward_begins(self) -> None:
        """The model is called."""
        self._forward_ns = perf_counter_ns()

    def forward_ends(self) -> None:
        """Its call is over; backward is next."""
        self._backward_ns = perf_counter_ns()
        if self._observers.are_any and self._forward_ns:
            self._observers.on_span("forward", "forward", self._forward_ns, self._backward_ns)

    def round_begins(self) -> None:
        """A round begins, and nothing of the last one is outstanding."""
        if not self.is_measuring:
            self.is_measuring = True
            self._measure()
        self._is_untaken = True
        self.landed_because = ""

    def begin_anew(self) -> None:
        """Rounds go another way from the next one on, and no figures are of the ones before."""
        self.is_measuring = False

    def backward_ends(self) -> None:
        """A round is complete."""
        if self._nbytes:
            self.rounds += 1
        if self._observers.are_any and self._backward_ns:
            now_ns = perf_counter_ns()
            self._observers.on_span("backward", "backward", self._backward_ns, now_ns)

    def step_begins(self) -> None:
        """``optimizer.step()`` is called."""
        self._step_ns = perf_counter_ns()

    def stepped(self, crossing_bytes: int, whole_because: str = "") -> None:
        """An optimizer was stepped with ``crossing_bytes`` of gradients outstanding, or whole."""
        self._steps += 1
        self._crossed_steps += crossing_bytes > 0
        if not self.is_measuring:
            return
        is_first, self._is_untaken = self._is_untaken, False
        self._iterations += is_first
        self._measured_steps += 1
        if why := self.whole_because or whole_because or self.landed_because:
            self._whole_steps[why] += 1
        self._crossed_bytes += crossing_bytes
        if is_first and self._iterations == _JUDGED_AFTER and self._crossed < _WORTH_IT:
            log.info(
                "%.1f %% of the bytes were still in flight at step(): %s",
                100 * self._crossed,
                self._reason(),
            )

    @property
    def _crossed(self) -> float:
        """The share of all bytes that crossed the barrier."""
        return self._crossed_bytes / max(self._nbytes * self._iterations, 1)

    @property
    def _comm_ns(self) -> int:
        """For how long something was on the wire."""
        return self._busy_ns() - self._busy_before_ns if self.is_measuring else 0

    @property
    def _overlap(self) -> float:
        """The share of that in which the training thread did not wait."""
        comm_ns = self._comm_ns
        return max(0.0, 1 - self._wait_ns.total() / comm_ns) if comm_ns else 0.0

    def _reason(self) -> str:
        """Why little crossed the barrier; empty if much did."""
        if not self._iterations:
            return self.whole_because
        if self._crossed >= _MUCH:
            return ""
        if self._whole_steps.total() > self._measured_steps / 2:
            return self._whole_steps.most_common(1)[0][0]
        worst = self.causes.worst
        if self._overlap >= (_ALL if worst else _NEARLY_ALL):
            return _HIDDEN
        return worst or _ARRIVED

    def step_ends(self) -> None:
        """``optimizer.step()`` returns."""
        if self._observers.are_any:
            now_ns = perf_counter_ns()
            self._observers.on_span("step", "optimizer.step", self._step_ns, now_ns)
            self._observers.on_step(self._steps, now_ns)

    def moment(self) -> int:
        """Now, in ns, when the user's thread begins to wait."""
        return perf_counter_ns()

    def waited(self, by: str, began_ns: int) -> int:
        """``by`` has made the user's thread wait for the wire; returns for how long, in ns."""
        now_ns = perf_counter_ns()
        waited_ns = now_ns - began_ns
        self._wait_ns[by] += waited_ns
        if self._observers.are_any:
            self._observers.on_span("wait", by, began_ns, now_ns)
        return waited_ns

    def updated(self, name: str, bundles: int, began_ns: int) -> None:
        """So many bundles were updated, the first of which has the parameter ``name``."""
        now_ns = perf_counter_ns()
        self._update_ns += now_ns - began_ns
        if self._observers.are_any:
            args = {"bundles": bundles}
            self._observers.on_span("update", f"update {name}", began_ns, now_ns, args)

    def figures(self) -> dict[str, int | float | str]:
        """The figures of ``bytesched.stats()``, per iteration where they are times."""
        iterations = max(self._iterations, 1)
        figures: dict[str, int | float | str] = {
            "iterations": self._iterations,
            "steps": self._steps,
            "barrier_crossed_steps": self._crossed_steps,
            "barrier_crossed_pct": 100 * self._crossed,
            "reason": self._reason(),
            "exposed_comm_ms": self._wait_ns.total() / _MS / iterations,
            "comm_ms": self._comm_ns / _MS / iterations,
            "overlap_pct": 100 * self._overlap,
            "bytes_per_step": self._nbytes,
            "chunks": self._chunks,
            "partition_bytes": self._setting.partition_bytes,
            "credit_bytes": self._setting.credit_bytes,
            "update_ms": self._update_ns / _MS / iterations,
        }
        for name, ns in self._wait_ns.most_common(_WORST):
            figures[f"wait_ms/{name}"] = ns / _MS / iterations
        return figures
