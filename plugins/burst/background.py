"""Background: another job in the gaps in which a rank waits for others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter_ns

import torch

from bytesched.burst.admission import Admission
from bytesched.errors import BackgroundError
from bytesched.observe import Observers

log = logging.getLogger("bytesched")

_PATIENCE_S = 5.0


class Background:
    """Runs ``step_fn()`` again and again, on a thread of its own, while the foreground waits.

    A step begins only where it is predicted to end before the foreground is needed (see
    `bytesched.burst.admission`), and on CUDA runs on a stream of its own, of which one step at a
    time is queued. What goes wrong in it stays with it: the foreground goes on, ``check()`` and
    ``close()`` raise.

    The step shares the process: it must not draw from torch's default generator, nor change what
    is global.

    Args:
        step_fn: one step of the job; the shorter, the more gaps it fits into.
        slowdown_limit: share of its mean iteration time that the foreground may lose. An iteration
            that lost more is made up for by later ones, in which no step begins.
        step_timeout_s: a step that takes longer is taken for stuck.
        device: the CUDA device that the steps run on, if they do.
    """

    def __init__(
        self,
        step_fn: Callable[[], object],
        *,
        slowdown_limit: float = 0.05,
        step_timeout_s: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        self._step_fn = step_fn
        self._timeout_s = step_timeout_s
        self._device = device
        self._admission = Admission(slowdown_limit)
        self._changed = threading.Condition()
        self._paused = self._closed = False
        self._running_since_s: float | None = None
        self._error: BackgroundError | None = None
        self.observers = Observers()
        #: that have ended
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="bytesched-background", daemon=True)
        self._thread.start()

    # -- the foreground's thread -------------------------------------------------------

    def iteration_begins(self) -> None:
        """The foreground begins its next iteration."""
        with self._changed:
            self._admission.iteration_begins(perf_counter_ns())
            self._find_stuck()

    def iteration_ends(self) -> None:
        """The foreground has ended it."""
        with self._changed:
            self._admission.iteration_ends(perf_counter_ns())

    @contextmanager
    def gap(self, name: str) -> Iterator[None]:
        """Around a wait of the foreground; waits of one name recur in every iteration."""
        with self._changed:
            self._admission.gap_begins(name, perf_counter_ns())
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._admission.gap_ends(perf_counter_ns())

    # -- any thread --------------------------------------------------------------------

    def pause(self) -> None:
        """From now on no step begins."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Steps may begin again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    @property
    def slowdown(self) -> float:
        """What the foreground loses, as a share of its mean iteration time; 0 if unknown."""
        with self._changed:
            return self._admission.slowdown

    def check(self) -> None:
        """Raises `BackgroundError` if a step has raised, or does not return."""
        with self._changed:
            self._find_stuck()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Returns when the step under way has ended; raises as ``check()``. Idempotent."""
        self._stop()
        self._thread.join(self._timeout_s if self._error is None else _PATIENCE_S)
        self.check()

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop()
        if error is None:
            self.close()

    def _find_stuck(self) -> None:
        since_s = self._running_since_s
        if self._error is None and since_s is not None and monotonic() - since_s > self._timeout_s:
            self._error = BackgroundError(
                f"background step {self.steps} has not returned for {self._timeout_s:g} s; no "
                "other begins. Raise step_timeout_s if it was only slow"
            )
            log.error("%s", self._error)

    # -- the thread of the background --------------------------------------------------

    def _run(self) -> None:
        stream: torch.cuda.Stream | None = None
        try:
            if self._device is not None:
                # The lowest priority there is: a foreground on one of higher priority goes first.
                stream = torch.cuda.Stream(self._device, priority=0)
                # What the job begins with was made on other streams.
                stream.wait_stream(torch.cuda.default_stream(self._device))
        except Exception as error:  # noqa: BLE001 - check() raises it
            self._end(f"making a stream on {self._device} raised", error)
            return
        while True:
            with self._changed:
                # What does not fit now will not fit later in this gap: the next one notifies.
                self._changed.wait_for(
                    lambda: (
                        self._closed
                        or (not self._paused and self._admission.fits(perf_counter_ns()))
                    )
                )
                if self._closed or self._error is not None:
                    return
                self._running_since_s = monotonic()
            began_ns = perf_counter_ns()
            try:
                with self._on(stream):
                    self._step_fn()
            except BaseException as error:  # noqa: BLE001 - check() raises it
                # sys.exit() in a step, too, would end this thread without a word.
                self._end(f"background step {self.steps} raised", error)
                return
            finally:
                self._running_since_s = None
            ended_ns = perf_counter_ns()
            with self._changed:
                self._admission.step_took(ended_ns - began_ns)
                self.steps += 1
            if self.observers:
                self.observers.on_span("background", f"step {self.steps}", began_ns, ended_ns)

    def _end(self, what: str, error: BaseException) -> None:
        """No step begins any more, because of an error."""
        log.error("%s; the foreground goes on", what, exc_info=error)
        self._error = BackgroundError(f"{what} {type(error).__name__}: {error}")
        self._error.__cause__ = error

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """A step on a stream; on exit it is over, so that no second one is queued behind it."""
        if stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            over = torch.cuda.Event(blocking=True)
            over.record(stream)
        over.synchronize()
