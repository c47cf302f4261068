"""What a session measures about itself: whether the barrier was crossed, and what it cost."""

from __future__ import annotations

import logging
from collections import Counter
from time import perf_counter_ns

from bytesched.observe import Observers
from bytesched.plugins.layout.slots import Bundle
from bytesched.plugins.session.carrier import Traffic
from bytesched.plugins.session.causes import Causes
from bytesched.tunable import Setting

__all__ = ["Meter"]

_MS = 1e6
_WORST = 8

#: After so many steps it is logged, once, if less than this share of the bytes crossed the barrier.
_JUDGED_AFTER = 50
_WORTH_IT = 0.02
#: From this share on, nothing has to be explained.
_MUCH = 0.5

_HIDDEN = "communication is hidden behind backward already, there is little to gain"

log = logging.getLogger("bytesched")


class Meter:
    """Counts and times; every method costs a clock reading and a few additions."""

    def __init__(self, observers: Observers, parameters: int) -> None:
        self._observers = observers
        self._parameters = parameters
        #: of the plan, once there is one
        self._nbytes = self._chunks = 0
        self._partition_bytes = self._credit_bytes = 0
        self._forward_ns = self._backward_ns = self._step_ns = 0
        self._wait_ns: Counter[str] = Counter()
        self._update_ns = 0
        self._crossed_steps = 0
        #: steps that updated everything at once, by the reason
        self._whole_steps: Counter[str] = Counter()
        #: why every step does, where that is known from the start
        self.whole_because = ""
        #: what reads gradients in front of ``step()``
        self.causes = Causes(parameters)
        self._crossed_bytes = 0
        self._steps = 0
        #: time spent in the gradient hooks
        self.hook_ns = 0
        self._rounds = 0

    def active(self, nbytes: int, chunks: int, setting: Setting) -> None:
        """The warm-up is over: so many bytes in so many chunks are sent in each round."""
        self._nbytes = nbytes
        self.changed(chunks, setting)

    def changed(self, chunks: int, setting: Setting) -> None:
        """There are other sizes from now on."""
        self._chunks = chunks
        self._partition_bytes = setting.partition_bytes
        self._credit_bytes = setting.credit_bytes

    def forward_begins(self) -> None:
        """The model is called."""
        self._forward_ns = perf_counter_ns()

    def forward_ends(self) -> None:
        """Its call is over; backward is next."""
        self._backward_ns = perf_counter_ns()
        if self._observers and self._forward_ns:
            self._observers.on_span("forward", "forward", self._forward_ns, self._backward_ns)

    def backward_ends(self) -> None:
        """A round is complete."""
        if self._nbytes:
            self._rounds += 1
        if self._observers and self._backward_ns:
            now_ns = perf_counter_ns()
            self._observers.on_span("backward", "backward", self._backward_ns, now_ns)

    def step_begins(self) -> None:
        """``optimizer.step()`` is called."""
        self._step_ns = perf_counter_ns()

    def stepped(self, crossing_bytes: int, whole_because: str = "") -> None:
        """An optimizer was stepped while ``crossing_bytes`` of its gradients were outstanding.

        Args:
            whole_because: why it updated everything at once, if it had to.
        """
        self._steps += 1
        if why := self.whole_because or whole_because:
            self._whole_steps[why] += 1
        self._crossed_steps += crossing_bytes > 0
        self._crossed_bytes += crossing_bytes
        if self._steps == _JUDGED_AFTER and self._nbytes and self._crossed < _WORTH_IT:
            log.info(
                "%.1f %% of the bytes were still on their way at step(): %s",
                100 * self._crossed,
                self._reason(),
            )

    @property
    def _crossed(self) -> float:
        """The share of all bytes that crossed the barrier."""
        return self._crossed_bytes / max(self._nbytes * self._steps, 1)

    def _reason(self) -> str:
        """Why little crossed the barrier; empty if much did."""
        if not self._steps or self._crossed >= _MUCH:
            return ""
        if self._whole_steps.total() > self._steps / 2:
            return self._whole_steps.most_common(1)[0][0]
        return self.causes.worst or _HIDDEN

    def step_ends(self) -> None:
        """``optimizer.step()`` returns."""
        if self._observers:
            now_ns = perf_counter_ns()
            self._observers.on_span("step", "optimizer.step", self._step_ns, now_ns)
            self._observers.on_step(self._steps, now_ns)

    def waited(self, by: str, began_ns: int, bundle: Bundle | None) -> None:
        """The user's thread waited since ``began_ns``; ``by`` is what made it wait."""
        now_ns = perf_counter_ns()
        self._wait_ns[by] += now_ns - began_ns
        if self._observers:
            self._observers.on_span("wait", by, began_ns, now_ns)
            if bundle is not None:
                for chunk in bundle.chunks:
                    self._observers.on_flow("f", chunk.index, "wait", now_ns)

    def updated(self, bundles: list[Bundle], began_ns: int) -> None:
        """The updater applied ``bundles``."""
        now_ns = perf_counter_ns()
        self._update_ns += now_ns - began_ns
        if self._observers:
            name = f"update {bundles[0].slots[0].name}"
            self._observers.on_span("update", name, began_ns, now_ns, {"bundles": len(bundles)})

    def figures(self, traffic: Traffic) -> dict[str, int | float | str]:
        """The figures of ``bytesched.stats()``, per step where they are times."""
        steps = max(self._steps, 1)
        nbytes = self._nbytes
        wait_ms = sum(self._wait_ns.values()) / _MS / steps
        comm_ms = traffic.busy_ns / _MS / steps
        figures: dict[str, int | float | str] = {
            "steps": self._steps,
            "barrier_crossed_steps": self._crossed_steps,
            "barrier_crossed_pct": 100 * self._crossed,
            "reason": self._reason(),
            "exposed_comm_ms": wait_ms,
            "comm_ms": comm_ms,
            "overlap_pct": 100 * max(0.0, 1 - wait_ms / comm_ms) if comm_ms else 0.0,
            "bytes_per_step": nbytes,
            "chunks": self._chunks,
            "partition_bytes": self._partition_bytes,
            "credit_bytes": self._credit_bytes,
            "scheduler_cpu_us_per_chunk": traffic.cpu_ns / 1e3 / max(traffic.chunks, 1),
            "hook_us_per_parameter": self.hook_ns / 1e3 / max(self._rounds * self._parameters, 1),
            "update_ms": self._update_ns / _MS / steps,
        }
        for name, ns in self._wait_ns.most_common(_WORST):
            figures[f"wait_ms/{name}"] = ns / _MS / steps
        return figures
