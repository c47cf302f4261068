"""From a schedule to a session: a step begins, a stage has its gradients, the step is over."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PeerLost, PluginError

from ..c10d.shell import take_over
from ..engine.session import Session
from ..layout.slots import Slot
from .root import StageModules

__all__ = ["StageReductions", "take_from_ddp"]

#: in what Gloo says of a connection whose other side has ended
_LOST: Final = ("closed by peer", "reset by peer", "Broken pipe")


class StageReductions:
    """Gradients of stages become a session's when their schedule has completed them.

    Args:
        root: the stages.
        slots: their parameters.
        rank: that of this process, for errors.
    """

    def __init__(
        self, root: StageModules, slots: Sequence[Slot], session: Session, rank: int
    ) -> None:
        # What is alive as long as the schedule is must not be kept by the session.
        self._weak_root = weakref.ref(root)
        self._weak_stages = [weakref.ref(stage) for stage in root.schedule.stages]
        self._session = session
        self._rank = rank
        #: the order that was checked last
        self._checked: object = None
        by_id = {id(slot.parameter): slot for slot in slots}
        stages_of: Counter[Slot] = Counter()
        for stage in root.schedule.stages:
            found = [by_id[id(p)] for p in stage.submod.parameters() if id(p) in by_id]
            stages_of.update(found)
            stage.perform_reduce_grad = partial(self._reduce, stage.perform_reduce_grad, found)
        for slot, count in stages_of.items():
            # One that several stages share is complete in the last of them.
            slot.expected = count
        root.use(self._step)

    def close(self) -> None:
        """Stages and schedule are as they were."""
        for weak_stage in self._weak_stages:
            if (stage := weak_stage()) is not None:
                vars(stage).pop("perform_reduce_grad", None)
        if (root := self._weak_root()) is not None:
            root.schedule.reset_step()

    def _step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        root = self._weak_root()
        assert root is not None
        if not root.schedule.trains:
            return own(*args, **kwargs)
        self._check_order(root)
        try:
            output = own(*args, **kwargs)
        except BaseException as error:
            named = self._named(error, root)
            if self._session.is_interrupted:
                # Replicas wait for the rest of what was sent in part.
                self._session.fail(named)
            if named is error:
                raise
            raise named from error
        self._session.backward_over()
        return output

    def _named(self, error: BaseException, root: StageModules) -> BaseException:
        """``error``, as one of ours if torch has only said that a connection is broken."""
        text = str(error).strip()
        is_torchs = type(error) in (RuntimeError, dist.DistBackendError)
        if not is_torchs or not any(sign in text for sign in _LOST):
            return error
        mine = root.schedule.group
        others = [r for r in dist.get_process_group_ranks(mine) if r != self._rank]
        return PeerLost(
            f"{'a rank' if len(others) > 1 else 'rank'} of this pipeline, "
            f"{', '.join(map(str, others))}, is gone ({text}); see its own log for the reason",
            peers=others if len(others) == 1 else (),
            rank=self._rank,
        )

    def _reduce(self, complete: Callable[[int], None], slots: list[Slot], scale: int) -> None:
        """The gradients of a stage, of ``slots``, are its last once they are scaled."""
        complete(scale)
        root = self._weak_root()
        if root is None or not root.schedule.trains:
            # An evaluation goes through the whole order, without any backward pass.
            return
        for slot in slots:
            if slot.parameter.grad is not None:
                self._session.gradient(slot)

    def _check_order(self, root: StageModules) -> None:
        schedule = root.schedule
        if schedule.order is self._checked:
            return
        if unreduced := schedule.unreduced():
            raise PluginError(
                f"the order of {schedule.name} never reduces stage "
                f"{', '.join(map(str, unreduced))} on rank {self._rank}: give it REDUCE_GRAD after "
                "the stage's last B or W, or load it as format='compute_only'"
            )
        self._checked = schedule.order


def take_from_ddp(root: StageModules) -> Callable[[], Callable[[], None]]:
    """What makes stages run without the DDP they are in; what that returns undoes it.

    DDP reduces in hooks of parameters. None of them is called where a schedule computes weight
    gradients apart, so that replicas would drift apart without an error.
    """
    in_ddp = [
        (weakref.ref(stage), weakref.ref(stage.submod))
        for stage in root.schedule.stages
        if isinstance(stage.submod, DistributedDataParallel)
    ]

    def take() -> Callable[[], None]:
        undo = [_take(weak_stage, weak_ddp) for weak_stage, weak_ddp in in_ddp]

        def give_back() -> None:
            for step in undo:
                step()

        return give_back

    return take


def _take(
    weak_stage: weakref.ref[Any], weak_ddp: weakref.ref[DistributedDataParallel]
) -> Callable[[], None]:
    stage, ddp = weak_stage(), weak_ddp()
    assert stage is not None
    assert ddp is not None
    reduced = frozenset(id(p) for p in ddp.parameters() if p.requires_grad)
    give_back = take_over(weak_ddp, reduced)
    stage.submod = ddp.module
    # The stage has kept it alive.
    kept = ddp

    def undo() -> None:
        stage = weak_stage()
        if stage is not None:
            give_back()
            stage.submod = kept

    return undo
