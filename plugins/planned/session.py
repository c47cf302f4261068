"""One model whose gradients are planned: its parts, its steps, and its life."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from bytesched.errors import PluginError
from bytesched.share.turn import turn_figures
from bytesched.tunable import Setting
from bytesched.urgency import URGENCY
from bytesched.values import size_text

from ..figures.meter import ROUNDING, UNSEEN
from ..proxies.entries import guard_entries
from ..proxies.passes import watch_passes
from .gates import Gates
from .planning import PLANNED_AGAIN_IN
from .rounds import Rounds
from .sending import refuse_capture
from .source import Phase
from .stepping import Stepping
from .terms import Terms
from .tuned import Tuned

__all__ = ["PlannedSession"]

log = logging.getLogger("bytesched")


class PlannedSession(Rounds):
    """The life of one wrapped model.

    Who inherits hooks what tells the source, and keeps in ``_undo`` what ends that.

    Args:
        root: the module whose call is a forward pass; not kept alive.
        can_stop: gradients can be the framework's for a while, to compare.
        changed_steps: steps after a change of sizes that show nothing.
    """

    #: of the model, for figures
    _name: str

    def __init__(
        self,
        root: nn.Module,
        terms: Terms,
        *,
        can_stop: bool = False,
        changed_steps: int = PLANNED_AGAIN_IN,
    ) -> None:
        super().__init__(terms)
        self._root = weakref.ref(root)
        self._parameters = [slot.parameter for slot in self.slots]
        self._names = {id(slot.parameter): slot.name for slot in self.slots}
        self._stepping = Stepping(
            self._updates,
            self._names,
            self._meter,
            begin=self.begin,
            is_off=lambda: self._is_off,
            synchronize=self.synchronize_all,
        )
        self._gates = Gates(
            root,
            self.slots,
            self._updates,
            self.observers,
            begins=self.forward_begins,
            ends=self.forward_ends,
            compiled=self._inside_compiled,
        )
        #: buckets that were handed out before the current backward pass
        self._handed_out = 0
        #: an exception has ended a backward pass in the middle of a round
        self._is_interrupted = False
        #: a round was sent as those after it
        self._has_begun = False
        self._closed = self._is_off = False
        self._undo: list[Callable[[], None]] = []
        self._tuned: Tuned | None = None
        self._guards = terms.config.guard
        guard_entries()
        try:
            if terms.config.tune and terms.carrier:
                self._tuned = Tuned(
                    terms,
                    self,
                    self._clock,
                    self._failures,
                    can_stop=can_stop,
                    changed_steps=changed_steps,
                    change=self._change,
                )
                self._undo.append(self._tuned.close)
            elif terms.config.tune and self._wire.rank == 0:
                log.warning("tune is on, but sizes of this model cannot change during training")
            self._undo.append(self._watch())
            self._undo.append(URGENCY.observe(self.observers))
            self._hook(root)
            if self._turns is not None:
                self._turns.hook(root)
            self._undo.append(self._stepping.close)
        except BaseException:
            self.close()
            raise

    def _watch(self) -> Callable[[], None]:
        """Is told of backward passes from now on; returns what ends that."""
        return watch_passes(self)

    @abstractmethod
    def _hook(self, root: nn.Module) -> None:
        """Hooks what the source is told by."""

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> None:
        """Updates of ``optimizer`` are deferred from now on, if it may cross the barrier.

        ``kind`` is the class whose ``step()`` does them.
        """
        if self.owners is not None:
            self.owners.refuse_late()
        # The user may name the optimizer instead of the model, which is there as long as it is.
        self._stepping.add(optimizer, kind, self.root, cross=cross)

    def steps_whole(self, why: str) -> None:
        """No step can cross the barrier, for the reason ``why``, which ``stats()`` shows."""
        self._meter.whole_because = why

    # -- forward -----------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """The root is being called, and was so before the session had a hook."""
        self._gates.begin(module, args)

    @abstractmethod
    def forward_begins(self, module: nn.Module) -> None:
        """The root is about to be called, and may be trained on."""

    def _check_forward(self) -> None:
        """Raises the first error, or why a forward pass cannot begin."""
        self._failures.check()
        if self._wire.has_streams:
            refuse_capture()

    def forward_ends(self) -> None:
        """It has returned or raised."""
        self._meter.forward_ends()

    def _inside_compiled(self) -> None:
        if self._stepping.crosses:
            self._stepping.stop_crossing()
            log.warning(
                "torch.compile was applied after bytesched.wrap, or wrap was not given what it has "
                "made: scheduling inside backward, stepping whole; wrap the compiled model to "
                "cross the barrier"
            )

    # -- backward ----------------------------------------------------------------------

    def backward_begins(self) -> None:
        """See `Watcher`: everything from before has come."""
        self._handed_out = self.source.handed_out
        if self._is_off or self._failures.error is not None or self.source.phase is Phase.OPEN:
            # Another pass may complete the round, whose buckets nothing writes again. An error is
            # raised where this model is used: the pass may be of another one.
            return
        self.land_all("backward")
        self.source.backward_begins(self._parameters)

    @abstractmethod
    def backward_ends(self) -> None:
        """See `Watcher`."""

    def backward_failed(self, error: BaseException) -> BaseException:
        """See `Watcher`."""
        if self._is_off or self.source.phase is Phase.IDLE:
            return error
        if self.source.handed_out == self._handed_out:
            # A pass beside the round.
            return error
        if self._failures.error is not None:
            # Whatever autograd has made of it on its way.
            self._failures.is_error_seen = True
            return self._failures.error
        ended = PluginError(
            f"an exception ended the last backward() on rank {self._wire.rank} when some of its "
            "gradients had been sent already; unwrap, and wrap again to go on"
        )
        self._is_interrupted = True
        self._failures.fail(ended, is_raised=True, cause=error)
        return error

    def _began(self, chunks: int, nbytes: int) -> None:
        if self._wire.rank == 0 and not (self._has_begun and self._tuned is not None):
            if not self._has_begun:
                log.info(UNSEEN)
            log.info(
                "%d ranks, %d tensors, %s in %d chunk%s, policy %s, mode %s%s%s",
                self._wire.size,
                len(self.slots),
                size_text(nbytes),
                chunks,
                "s" if chunks > 1 else "",
                self._setting.policy,
                self.mode,
                "" if self._wire.size <= 2 or self._rounds_alike(chunks) else f", {ROUNDING}",
                "" if self._is_compared else ", never compared with plain training",
            )
        self._has_begun = True

    @property
    def _is_compared(self) -> bool:
        """Whether it goes on without a plan where that is not slower, or was told not to ask."""
        return self._tuned is not None or not self._guards

    def _rounds_alike(self, chunks: int) -> bool:
        """Whether so many chunks of a round are added up as plain training adds them up."""
        return False

    # -- tuning ------------------------------------------------------------------------

    def _learned(self) -> bool:
        return self._gates.are_learned()

    def _round_ended(self) -> None:
        if self._tuned is not None and self._may_tune():
            self._tuned.round_ends()

    def _tune(self) -> None:
        """A forward pass begins: what has been decided is applied, on all ranks in the same one."""
        if self._tuned is not None and self._may_tune() and self.source.phase is Phase.IDLE:
            self._tuned.before_forward(self._stepping.steps)

    def _may_tune(self) -> bool:
        """Whether all ranks take part in every round."""
        return True

    @abstractmethod
    def _change(self, setting: Setting) -> bool:
        """Goes on with ``setting``; whether it could. Nothing is under way."""

    def _change_rounds(self, setting: Setting) -> None:
        """The same for what is common to all sources."""
        assert self._tuned is not None
        self._setting = setting
        self._last_sent, self._round_busy_ns = (0, 0), 0
        self.planning.change(setting.policy, self._tuned.credit_bytes(setting))
        self._meter.changed(0, setting)
        self._measure_anew()

    # -- steps -------------------------------------------------------------------------

    def begin(self) -> None:
        """``step()`` is about to update: raises the first error, if there was one."""
        self._failures.check()

    def synchronize_all(self) -> None:
        """Applies every update that is owed."""
        if not self._is_off:
            self._updates.apply_all()

    # -- life --------------------------------------------------------------------------

    @property
    def root(self) -> nn.Module | None:
        """The module whose call is a forward pass; None when nothing else refers to it any more."""
        return self._root()

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._failures.error

    @property
    def unseen_error(self) -> BaseException | None:
        """That error, if it was raised nowhere yet."""
        return None if self._failures.is_error_seen else self._failures.error

    @property
    def rounds_finished(self) -> int:
        """How many rounds have been complete."""
        return self.source.finished

    @property
    def is_measuring(self) -> bool:
        """Whether rounds are sent as those after them, so that they count in its figures."""
        return self._meter.is_measuring

    @property
    def mode(self) -> str:
        """The rung of the ladder: "cross" the barrier, schedule inside "backward" only, "plain"."""
        if self._is_off:
            return "plain"
        return "cross" if self._stepping.crosses else "backward"

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank; the user's thread raises ``error`` now."""
        self._failures.fail(error, is_raised=True)

    def raise_first(self, error: BaseException) -> NoReturn:
        """As `fail`; raises ``error``, or what came before it and has brought it about."""
        self._failures.raise_first(error)

    def flush(self) -> None:
        """Everything that was started is summed, and every step that was taken is applied."""
        if self._is_interrupted:
            # What was taken was applied before that pass began.
            return
        self._failures.check()
        if self.owners is not None:
            # Gradients come where all ranks read them.
            self._updates.apply_all()
        elif self.source.phase is Phase.IDLE:
            self.land_all("flush")

    @abstractmethod
    def restore(self) -> None:
        """What is spread over the ranks is whole here: they go on without each other."""

    def leave(self) -> None:
        """This rank takes no more steps."""
        self._failures.check()
        if self.owners is not None:
            self.owners.leave()

    def disown(self) -> None:
        """In a forked child: parameters and gradients are ordinary ones, as they are now.

        Those that were not there when the process was forked raise PluginError when they are read.
        """
        self._is_off = True
        self.sending.disown()
        self._updates.disown()
        if self.owners is not None:
            self.owners.disown()

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off; does not flush. Idempotent.

        Parameters whose update is owed become ordinary ones, with the value they have, unless
        ``release_parameters`` is false: then reading them raises the first error.
        """
        if self._closed:
            return
        self._closed = True
        if self.owners is not None:
            self.owners.close()
        self._take_gates_off()
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception:
                log.exception("a part of this session could not be ended")
        if release_parameters:
            self._updates.forget()
            if self.error is not None and not self._is_off:
                # Not as the process ends: the script may go on with another session.
                self.give_back()
        self._is_off = True
        self.let_go_of_buckets()
        self._wire.close()
        self.observers.close()

    def _take_gates_off(self) -> None:
        """Nothing waits in front of modules any more."""
        self._gates.close()
        if self._turns is not None:
            self._turns.close()

    @abstractmethod
    def give_back(self) -> None:
        """Gradients are the framework's, or nobody's; nothing may be under way."""

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the first rounds: those of `bytesched.figures.Figures`."""
        return {
            **self._meter.figures(),
            "model": self._name,
            "mode": self.mode,
            "order": self.order,
            "levels": self._wire.levels,
            "rank": self._wire.rank,
            "world_size": self._wire.size,
            **URGENCY.figures(),
            **turn_figures(),
        }

    def __repr__(self) -> str:
        state = f"{self.sending!r}, {self._updates!r}"
        if self.error is not None:
            state = f"failed: {self.error}"
        return f"<bytesched rank {self._wire.rank} of {self._wire.size}: {state}>"
