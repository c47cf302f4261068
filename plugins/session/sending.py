"""From a ready chunk to a reduced one: the scheduler, and the order that all ranks keep."""

from __future__ import annotations

from time import perf_counter_ns

from bytesched.core import SchedulerCore
from bytesched.observe import Observers
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.session.peers import Agreement
from bytesched.plugins.session.progress import Progress
from bytesched.plugins.session.streams import Streams
from bytesched.plugins.session.updater import Updater
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.transport import Transport
from bytesched.tunable import Setting

__all__ = ["Sending"]


class Sending:
    """One rank's part in sending the chunks of a plan in one order.

    Args:
        plan: the chunks.
        transport: what sends them.
        agreement: how all ranks come to the same order.
        credit_bytes: the most bytes in flight at a time.
        progress: told about every reduced chunk, and about errors.
        updater: given the bundles that were only waiting for a chunk.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        agreement: Agreement,
        *,
        credit_bytes: int,
        progress: Progress,
        updater: Updater,
        streams: Streams,
        observers: Observers,
    ) -> None:
        self._plan = plan
        self._agreement = agreement
        self._progress = progress
        self._updater = updater
        self._streams = streams
        self._observers = observers
        self.scheduler = Scheduler(
            SchedulerCore(agreement.queue(), credit_bytes=agreement.window_bytes(credit_bytes)),
            transport,
            announce=agreement.announce,
            on_finish=self._on_finish,
            on_error=progress.fail,
            observers=observers,
        )
        progress.story = self.scheduler.core.story
        agreement.bind(self.scheduler)

    def submit(self, chunk: CommTask) -> None:
        """All gradients of ``chunk`` are queued. The user's thread, in backward."""
        self._streams.backward_done(chunk, self._computed)

    def _computed(self, chunk: CommTask) -> None:
        self._agreement.ready()
        self.scheduler.notify_ready(chunk)
        if self._observers:
            self._observers.on_flow("s", chunk.index, "backward", perf_counter_ns())

    def change(self, setting: Setting) -> None:
        """Other chunks, sent otherwise; between the same two rounds on all ranks."""
        self._agreement.change(self._plan.chunks, setting)
        self.scheduler.set_credit(self._agreement.window_bytes(setting.credit_bytes))

    @property
    def order(self) -> str:
        """How the ranks agree at the moment."""
        return self._agreement.order

    def close(self) -> None:
        """Stops the threads."""
        self.scheduler.close()
        self._agreement.close()

    def _on_finish(self, chunk: CommTask) -> None:
        """The scheduler's thread."""
        with self._progress.changed:
            if chunk is self._plan.flags_chunk:
                self._plan.flags_reduced = True
            complete = []
            for bundle in self._plan.bundles_of[chunk.index]:
                bundle.sending -= 1
                if not bundle.sending and bundle.armed:
                    complete.append(bundle)
            self._updater.push(complete)
            if self._progress.outstanding == 1:
                self._agreement.round_ends()
            # Last: at 0 the user's thread, which reads it without the lock, may begin a round.
            self._progress.outstanding -= 1
            self._progress.notify()
