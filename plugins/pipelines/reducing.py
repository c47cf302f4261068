"""From a schedule to a session: a step begins, a stage has its gradients, the step is over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import BytesschedError, PeerLost, PluginError

from ..c10d.entry import Entry
from ..c10d.shell import take_over
from ..planned.hooked_session import HookedSession
from ..routes.group import is_cut
from .private import skip_self_sends
from .root import Schedule, StageModules


class StageReductions:
    """Gradients of stages become a session's when their schedule has completed them."""

    def __init__(
        self,
        root: StageModules,
        parameters: Sequence[nn.Parameter],
        session: HookedSession,
        rank: int,
        timeout_s: float,
    ) -> None:
        # What is alive as long as the schedule is must not be kept by the session.
        self._weak_root = weakref.ref(root)
        self._weak_stages = [weakref.ref(stage) for stage in root.schedule.stages]
        self._session = session
        self._rank = rank
        self._timeout_s = timeout_s
        #: the order that was checked last
        self._checked: object = None
        #: the order that the ranks of the pipeline have compared last
        self._compared = root.schedule.order
        #: the stages that this step of the schedule has not reduced yet; None outside of one
        self._awaited: set[int] | None = None
        #: the stages that have each parameter, by its id
        self._stages_of: dict[int, set[int]] = {}
        reduced = {id(parameter) for parameter in parameters}
        for stage in root.schedule.stages:
            found = _StageParameters(weakref.ref(stage), stage.submod, reduced)
            for parameter in found.parameters:
                self._stages_of.setdefault(id(parameter), set()).add(found.index)
            stage.perform_reduce_grad = partial(self._reduce, stage.perform_reduce_grad, found)
        session.on_close(skip_self_sends(root.schedule.stages))
        root.use(self._step)

    def close(self) -> None:
        """Stages and schedule are as they were."""
        for weak_stage in self._weak_stages:
            if (stage := weak_stage()) is not None:
                vars(stage).pop("perform_reduce_grad", None)
        if (root := self._weak_root()) is not None:
            root.schedule.set_step(None)

    def _step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        root = self._weak_root()
        assert root is not None
        if not root.schedule.trains:
            return own(*args, **kwargs)
        self._check_order(root)
        self._awaited = {stage.stage_index for stage in root.schedule.stages}
        try:
            output = own(*args, **kwargs)
            if self._awaited:
                self._refuse(
                    f"stage {', '.join(map(str, sorted(self._awaited)))} was not reduced on rank "
                    f"{self._rank}: a custom function for REDUCE_GRAD has to call "
                    "stage.perform_reduce_grad, as torch does without it"
                )
        except BaseException as error:
            first = self._session.error
            if first is not None and first is not error and isinstance(error, Exception):
                # Whatever torch has made of it where a stage has waited.
                raise first.with_traceback(None) from first.__cause__
            named = self._named(error, root)
            if self._session.is_interrupted:
                # Replicas wait for the rest of what was sent in part.
                self._session.fail(named)
            if named is error:
                raise
            raise named from error
        finally:
            self._awaited = None
        self._session.backward_over()
        return output

    def _named(self, error: BaseException, root: StageModules) -> BaseException:
        """``error``, as one of ours if torch has only said that a connection is broken."""
        text = str(error).strip()
        is_torchs = type(error) in (RuntimeError, dist.DistBackendError)
        if not is_torchs or not is_cut(text):
            return error
        mine = root.schedule.group
        others = [r for r in dist.get_process_group_ranks(mine) if r != self._rank]
        return PeerLost(
            f"{'a rank' if len(others) > 1 else 'rank'} of this pipeline, "
            f"{', '.join(map(str, others))}, is gone ({text}); see its own log for the reason",
            peers=others if len(others) == 1 else (),
            rank=self._rank,
        )

    def _reduce(self, complete: Callable[[int], None], stage: _StageParameters, scale: int) -> None:
        """The gradients of ``stage`` are its last once they are scaled."""
        complete(scale)
        if not stage.trains():
            # An evaluation goes through the whole order, without any backward pass.
            return
        if self._awaited is None:
            self._refuse(
                f"stage {stage.index} on rank {self._rank} runs in another schedule than the one "
                "that was wrapped, or its step() was kept from before: unwrap the optimizer, and "
                "wrap it with this schedule"
            )
        if why := stage.changed():
            self._refuse(
                f"stage {stage.index} on rank {self._rank} is not what was wrapped: {why}; unwrap "
                "the optimizer, and wrap it again"
            )
        self._awaited.discard(stage.index)
        for parameter in stage.parameters:
            # One that several stages share is complete in the last of them.
            is_last = self._awaited.isdisjoint(self._stages_of[id(parameter)])
            if (grad := parameter.grad) is None or not is_last:
                continue
            if grad._is_view():
                # Of torch.autograd.grad: what it is a view of would count as seen by others.
                parameter.grad = grad.detach()
            self._session.gradient(parameter)

    def _refuse(self, what: str) -> NoReturn:
        """Ends the session on all ranks: replicas would drift apart."""
        error = PluginError(what)
        self._session.fail(error)
        raise error

    def _check_order(self, root: StageModules) -> None:
        """Raises unless the order reduces all, and all ranks of the pipeline have the same."""
        schedule = root.schedule
        if schedule.order is self._checked:
            return
        if schedule.order is self._compared:
            self._check_reductions(schedule)
        else:
            try:
                with Entry(schedule.group, call="a step of another order") as ranks:
                    self._check_reductions(schedule)
                    ranks.agree(schedule.statements(), self._timeout_s)
            except BytesschedError as error:
                # Replicas would wait for the gradients of this step.
                self._session.fail(error)
                raise
        self._checked = self._compared = schedule.order

    def _check_reductions(self, schedule: Schedule) -> None:
        if unreduced := schedule.unreduced():
            raise PluginError(
                f"the order of {schedule.name} never reduces stage "
                f"{', '.join(map(str, unreduced))} on rank {self._rank}: give it REDUCE_GRAD after "
                "the stage's last B or W, or load it as format='compute_only'"
            )


class _StageParameters:
    """What of a stage is reduced."""

    def __init__(
        self, weak_stage: weakref.ref[Any], module: nn.Module, reduced: Collection[int]
    ) -> None:
        self._weak_stage = weak_stage
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._module = weakref.ref(inner)
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        self.index: int = weak_stage().stage_index  # type: ignore[union-attr]
        self.parameters: list[nn.Parameter] = []
        #: what got no gradient when the stage was wrapped
        self._frozen: list[nn.Parameter] = []
        for name, parameter in inner.named_parameters():
            if id(parameter) in reduced:
                self.parameters.append(parameter)
            elif name not in ignored and parameter.numel():
                self._frozen.append(parameter)

    def trains(self) -> bool:
        """Whether the step that runs has backward passes."""
        stage = self._weak_stage()
        return stage is not None and bool(stage.has_backward)

    def changed(self) -> str:
        """What is another than it was, so that its gradients would not be reduced, or twice."""
        stage = self._weak_stage()
        if stage is not None and stage.submod is not self._module():
            return f"its module was replaced, by a {type(stage.submod).__name__}"
        if any(parameter.grad is not None for parameter in self._frozen):
            return "parameters have gradients that required none when it was wrapped"
        return ""


def take_from_ddp(root: StageModules) -> Callable[[], None]:
    """Stages run without the DDP they are in from now on; returns what undoes that.

    DDP reduces in hooks of parameters. None of them is called where a schedule computes weight
    gradients apart, so that replicas would drift apart without an error.
    """
    taken = []
    for stage in root.schedule.stages:
        ddp = stage.submod
        if isinstance(ddp, DistributedDataParallel):
            taken.append((weakref.ref(stage), ddp, take_over(ddp)))
            stage.submod = ddp.module

    def undo() -> None:
        for weak_stage, ddp, give_back in taken:
            if (stage := weak_stage()) is not None:
                give_back()
                # The stage has kept it alive.
                stage.submod = ddp

    return undo
