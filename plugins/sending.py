"""From a ready chunk to a reduced one: the scheduler, and the order that all ranks keep."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from bytesched.config import Config
from bytesched.core import SchedulerCore
from bytesched.observe import Observers
from bytesched.order import Following, Leading
from bytesched.plugins.c10d import C10dTransport, Group
from bytesched.plugins.control import Follower, Leader
from bytesched.plugins.plan import Plan
from bytesched.plugins.progress import Progress
from bytesched.plugins.streams import Streams
from bytesched.plugins.updater import Updater
from bytesched.policy import named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask

__all__ = ["Sending"]

#: Followers start what the leader's credit let through.
_NO_LIMIT = 1 << 62

#: Up to this many ranks the leader's messages are few; above, a settled order is replayed.
_LED_RANKS = 8


class Sending:
    """One rank's part in sending the chunks of a plan in one order.

    Args:
        plan: the chunks.
        transport: what sends them.
        control: the group that the leader's order travels on.
        progress: told about every reduced chunk, and about errors.
        updater: given the bundles that were only waiting for a chunk.
    """

    def __init__(
        self,
        plan: Plan,
        transport: C10dTransport,
        control: Group,
        *,
        config: Config,
        credit_bytes: int,
        progress: Progress,
        updater: Updater,
        streams: Streams,
        observers: Observers,
    ) -> None:
        self._plan = plan
        self._policy = config.policy
        self._progress = progress
        self._updater = updater
        self._streams = streams
        self._observers = observers
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._replays = False
        leads = control.rank == 0
        self.scheduler = Scheduler(
            SchedulerCore(
                Leading(named_policy(config.policy)) if leads else Following(),
                credit_bytes=credit_bytes if leads else _NO_LIMIT,
            ),
            transport,
            announce=self._announce,
            on_finish=self._on_finish,
            on_error=progress.fail,
            observers=observers,
        )
        progress.story = self.scheduler.core.story
        if leads:
            auto = config.order == "auto" and control.size > _LED_RANKS
            self._leader = Leader(
                control,
                len(plan.chunks),
                replay=auto or config.order == "replay",
                blocked_ns=lambda: self.scheduler.blocked_ns,
            )
        else:
            self._follower = Follower(
                control,
                len(plan.chunks),
                ordered=self.scheduler.ordered,
                on_error=self.scheduler.fail,
            )

    def submit(self, chunk: CommTask) -> None:
        """All gradients of ``chunk`` are queued. The user's thread, in backward."""
        self._streams.backward_done(chunk, self._computed)

    def _computed(self, chunk: CommTask) -> None:
        if self._follower is not None:
            self._follower.chunk_ready()
        self.scheduler.notify_ready(chunk)
        if self._observers:
            self._observers.on_flow("s", chunk.index, "backward", perf_counter_ns())

    @property
    def order(self) -> str:
        """How the ranks agree at the moment: "leader" or "replay"."""
        side = self._leader or self._follower
        return "replay" if side is not None and side.replayed is not None else "leader"

    def close(self) -> None:
        """Stops the threads."""
        self.scheduler.close()
        if self._follower is not None:
            self._follower.close()

    # -- the scheduler's thread --------------------------------------------------------

    def _announce(self, chunks: Sequence[CommTask]) -> None:
        if self._leader is not None:
            self._leader.announce(chunks)

    def _on_finish(self, chunk: CommTask) -> None:
        with self._progress.changed:
            if chunk is self._plan.flags_chunk:
                self._plan.flags_reduced = True
            complete = []
            for bundle in self._plan.bundles_of[chunk.index]:
                bundle.sending -= 1
                if not bundle.sending and bundle.armed:
                    complete.append(bundle)
            self._updater.push(complete)
            if self._progress.outstanding == 1 and self._leader is not None:
                self._order_next_round(self._leader)
            # Last: at 0 the user's thread, which reads it without the lock, may begin a round.
            self._progress.outstanding -= 1
            self._progress.notify()

    def _order_next_round(self, leader: Leader) -> None:
        """Between two rounds the leader may change between choosing and replaying."""
        replays = leader.replayed is not None
        if replays is not self._replays:
            self._replays = replays
            queue = Following() if replays else Leading(named_policy(self._policy))
            self.scheduler.core.use_queue(queue)
        if leader.replayed is not None:
            self.scheduler.ordered(leader.replayed)
