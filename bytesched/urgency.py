"""Urgent sections: while one is open, no scheduler of this process starts anything new.

What a store sends through the next forward pass shares the link with collectives that this pass
itself waits for. `urgent` marks those. A hold only delays starts, on one rank and without a
message, so that an order stays as it is.

A hold ends early in two cases, either of which lets everything go until the section is over: this
rank itself waits for something that it may hold, and after a limit of time, as another rank may.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic, perf_counter_ns
from typing import Final

from bytesched.observe import Observers
from bytesched.scheduler import Scheduler
from bytesched.share.turn import HELD, released

__all__ = ["URGENCY", "Section", "Urgency", "begin", "urgent"]

log = logging.getLogger("bytesched")

#: A hold ends after so many times the longest of the last sections, within these bounds; at first,
#: and at most, after the second one.
_LIMIT_LENGTHS: Final = 4.0
_LIMITS_S: Final = (0.05, 1.0)
_LAST_SECTIONS: Final = 16


class Section:
    """One urgent section, from its beginning to its end."""

    def __init__(self, urgency: Urgency, name: str) -> None:
        self.name = name
        self.began_ns = perf_counter_ns()
        self._urgency = urgency

    def end(self) -> None:
        """What waited goes on, unless another section is open. Idempotent; on any thread."""
        self._urgency._end(self)

    def __repr__(self) -> str:
        return f"<Section {self.name!r}>"


class Urgency:
    """The open sections, and the schedulers that they hold.

    Args:
        limits_s: the least and the most time after which a hold ends by itself.
    """

    def __init__(self, limits_s: tuple[float, float] = _LIMITS_S) -> None:
        self._limits_s = limits_s
        # Events that begin here may end a session, which takes its schedulers out again.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._members: dict[Scheduler, None] = {}
        #: told of sections
        self._observers: dict[Observers, None] = {}
        self._sections: dict[Section, None] = {}
        #: threads that wait for something of ours
        self._waits = 0
        #: the limit has been reached since the first of the open sections began
        self._is_over = False
        #: the members are held, until then; looked at without the lock wherever something waits
        self.is_held = False
        self._until_s = 0.0
        self._lengths_ns: deque[int] = deque(maxlen=_LAST_SECTIONS)
        self._watch: threading.Thread | None = None
        #: totals
        self._count = self._released = 0
        self._total_ns = self._held_ns = 0

    # -- schedulers --------------------------------------------------------------------

    def join(self, scheduler: Scheduler) -> None:
        """``scheduler`` is held while a section is open, from now on."""
        with self._lock:
            self._members[scheduler] = None
            if self.is_held:
                scheduler.hold()
            else:
                self._apply()

    def leave(self, scheduler: Scheduler) -> None:
        """``scheduler`` is not held any more: it ends. Idempotent."""
        with self._lock:
            if scheduler not in self._members:
                return
            del self._members[scheduler]
            self._held_ns += scheduler.held_ns
            if self.is_held:
                scheduler.release()
            if not self._members:
                self.is_held = False
                self._changed.notify_all()

    def observe(self, observers: Observers) -> Callable[[], None]:
        """``observers`` are told of every section; returns what ends that."""
        with self._lock:
            self._observers[observers] = None

        def end() -> None:
            with self._lock:
                self._observers.pop(observers, None)

        return end

    # -- sections ----------------------------------------------------------------------

    def begin(self, name: str) -> Section:
        """Opens a section; what is on its way by now goes on, and nothing else starts."""
        section = Section(self, name)
        with self._lock:
            self._sections[section] = None
            self._count += 1
            self._apply()
        return section

    def _end(self, section: Section) -> None:
        with self._lock:
            if section not in self._sections:
                return
            del self._sections[section]
            now_ns = perf_counter_ns()
            length_ns = now_ns - section.began_ns
            self._total_ns += length_ns
            for observers in tuple(self._observers):
                observers.on_span("urgent", section.name, section.began_ns, now_ns)
            if self._is_over:
                # What came after the limit: a section that others waited for ends soon after it.
                length_ns = max(0, length_ns - int(1e9 * self._limit_s))
            self._lengths_ns.append(length_ns)
            if not self._sections:
                self._is_over = False
            self._apply()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This thread waits for something that may be held: nothing is, meanwhile."""
        with self._lock:
            self._waits += 1
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1
                self._apply()

    def figures(self) -> dict[str, int | float]:
        """Totals of this process, for ``stats()``."""
        with self._lock:
            held_ns = self._held_ns + sum(scheduler.held_ns for scheduler in self._members)
            return {
                "urgent_sections": self._count,
                "urgent_s": self._total_ns / 1e9,
                "held_s": held_ns / 1e9,
                "urgent_released": self._released,
            }

    # -- holding, with the lock ----------------------------------------------------------

    @property
    def _limit_s(self) -> float:
        least_s, most_s = self._limits_s
        if not self._lengths_ns:
            return most_s
        return min(max(_LIMIT_LENGTHS * max(self._lengths_ns) / 1e9, least_s), most_s)

    def _apply(self) -> None:
        """Holds all members, or lets them go, as it is to be now."""
        is_held = bool(self._sections) and not self._waits and not self._is_over
        if is_held is self.is_held or (is_held and not self._members):
            return
        self.is_held = is_held
        if is_held:
            self._until_s = monotonic() + self._limit_s
            self._look_after()
            for scheduler in tuple(self._members):
                scheduler.hold()
        else:
            for scheduler in tuple(self._members):
                scheduler.release()

    def _look_after(self) -> None:
        """A thread ends holds at their limit, as long as there is anything to hold."""
        if self._watch is None:
            self._watch = threading.Thread(target=self._run, name="bytesched-urgency", daemon=True)
            self._watch.start()
        self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            while self._members:
                if not self.is_held:
                    self._changed.wait()
                elif (left_s := self._until_s - monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    self._give_up()
            self._watch = None

    def _give_up(self) -> None:
        self._released += 1
        self._is_over = True
        if self._released == 1:
            log.warning(
                "the urgent section %r has held gradients back for %.3g s, which is its limit, and "
                "lets them go: the collective is slow, or another rank waits for a gradient before "
                "it comes to the section; read gradients and parameters on all ranks alike, and "
                "keep sections short (said once; stats()['urgent_released'] counts)",
                next(iter(self._sections)).name,
                self._limit_s,
            )
        self._apply()

    def __repr__(self) -> str:
        state = "held" if self.is_held else "open"
        return f"<Urgency {state}, {len(self._sections)} sections, {len(self._members)} schedulers>"


#: of this process
URGENCY: Final = Urgency()


def begin(name: str = "urgent") -> Section:
    """Open an urgent section, for a collective that ends elsewhere: call `Section.end` there."""
    return URGENCY.begin(name)


@contextmanager
def urgent(name: str = "urgent") -> Iterator[None]:
    """Hold what goes to a store back while a collective of your own is under way.

    Put it around what a forward or backward pass itself waits for: an all-to-all between experts, a
    sum of metrics, an operation of tensor or sequence parallelism. From its beginning to its end no
    store of this process starts a chunk; at most the credit and one chunk are still on their way.
    Gradients over torch.distributed and Horovod are not held: they start in backward, in an order
    that all ranks keep. Use a process group of its own for the collective.
    `name` is what the timeline calls the section.

    No rank tells another one. A rank may only start later, never in another order, so it is safe if
    some ranks enter a section and others do not. A section never holds for ever: while this rank
    waits for a gradient or a parameter, everything goes on, and after a limit (four times the
    longest of the last sections, at most a second) as well. Sections may be nested, on any threads.
    """
    # What ranks wait for together may need the turn of another rank; and a section that waits for
    # a turn would hold gradients back.
    with released() if HELD else nullcontext():
        section = URGENCY.begin(name)
        try:
            yield
        finally:
            section.end()
