"""What is watched in a script: a DistributedDataParallel, or an optimizer of Horovod's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from bytesched.environment import is_horovod_elastic

from ..c10d.entry import Announcement
from ..left import name_of_ddp
from ..pipelines.root import StageModules
from .owners import compiled_around, owners_of, parameter_ids
from .watched import Announced, Watched

#: where frameworks call step() by themselves, on the ranks that have no state yet
_MAKE_STATE: Final = frozenset({("torch.distributed.checkpoint.state_dict", "_init_optim_state")})


class WatchedDdp(Watched):
    """A DistributedDataParallel; its optimizers are those that step over its parameters.

    So its first iteration is plain. That an optimizer exists means little: it may be a remnant, or
    inside another one, or have its ``step()`` compiled, which rounds differently.
    """

    ticks = "collectives of its process group"

    def __init__(self, ddp: Any, module: nn.Module) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(name_of_ddp(module), type(module).__name__, rank)
        self.ddp = ref(ddp)
        #: optimizers that have stepped, in the order of their first step
        self._stepped: list[ref[torch.optim.Optimizer]] = []

    def parameters(self) -> set[int]:
        ddp = self.ddp()
        return parameter_ids(ddp) if ddp is not None else set()

    def is_about(self, optimizer: torch.optim.Optimizer, module: object) -> bool:
        ddp = self.ddp()
        if isinstance(module, StageModules):
            return any(other is ddp for other in module.ddps())
        return ddp is not None and getattr(module, "_orig_mod", module) is ddp

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Watched.before_step`."""
        stepped = self._alive()
        if optimizer not in self._settled and optimizer not in stepped:
            mine = parameter_ids(optimizer)
            if mine & self.parameters():
                # Of two for the same parameters, the later one counts.
                kept = [other for other in stepped if not mine & parameter_ids(other)]
                self._stepped = [ref(other) for other in (*kept, optimizer)]
        super().before_step(optimizer)

    def _modules(self) -> list[nn.Module]:
        ddp = self.ddp()
        return [] if ddp is None else [ddp, *compiled_around(ddp)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self._alive() if optimizer not in self._settled]

    def _alive(self) -> list[torch.optim.Optimizer]:
        """Those of `_stepped`."""
        return [o for o in (stepped() for stepped in self._stepped) if o is not None]

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(parameter_ids(optimizer) & self.parameters())

    def _announce(self, statements: list[str]) -> Announced | None:
        ddp = self.ddp()
        if ddp is None or ddp.process_group.size() == 1:
            return None
        return Announcement(ddp.process_group, statements)

    def _clock(self) -> int:
        ddp = self.ddp()
        if ddp is None:
            return 0
        if ddp.device_type != "cpu":
            # What was only queued is no sign of the other ranks.
            torch.cuda.synchronize()
        rounds = 0
        for session in self._sessions():
            # Of a round that is still on its way, not all ranks need to have begun theirs.
            session.flush()
            rounds += getattr(session, "rounds_finished", 0)
        return rounds + int(ddp.process_group._get_sequence_number_for_group())

    def _counts(self) -> bool:
        return not any(
            (frame.f_globals.get("__name__"), frame.f_code.co_name) in _MAKE_STATE
            for frame in _frames()
        )

    def _why_not(self) -> str:
        ddp = self.ddp()
        join = getattr(ddp, "_join_config", None)
        if join is not None and join.enable:
            return "join() shadows DDP's own all-reduces, and no others"
        return "there is one rank" if ddp is not None and ddp.process_group.size() == 1 else ""


class WatchedHorovod(Watched):
    """What an optimizer of Horovod's updates; its model is the module around all of that.

    It is wrapped after its first ``step()``: before, a rank may call it alone, and a wrap is
    collective. In an elastic run it is wrapped in its first forward pass, as a rank that joins
    later has to do what the others do.

    Horovod's own ``step()`` is what ranks do together. Of the class beneath, they may call it
    alone: `hvd.broadcast_optimizer_state` does, to make a state.
    """

    ticks = "steps"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        import horovod.torch as hvd

        kind = type(optimizer).__name__
        super().__init__(f"Horovod's {kind}", kind, hvd.rank())
        self._optimizer = ref(optimizer)
        self._step_code = inspect.unwrap(type(optimizer).step).__code__
        self._steps_seen = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Watched.before_step`."""
        if optimizer not in self._settled and self._concerns(optimizer) and self._counts():
            self._steps_seen += 1
        super().before_step(optimizer)

    def parameters(self) -> set[int]:
        optimizer = self._optimizer()
        return parameter_ids(optimizer) if optimizer is not None else set()

    def is_about(self, optimizer: torch.optim.Optimizer, module: object) -> bool:
        return self._concerns(optimizer)

    def _modules(self) -> list[nn.Module]:
        return owners_of(self.parameters())

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [optimizer]

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer is self._optimizer()

    def _announce(self, statements: list[str]) -> Announced | None:
        optimizer = self._optimizer()
        ranks = getattr(optimizer, "process_set", None)
        # Adasum has no process set, and ranks that come and go announce nothing before they meet.
        if is_horovod_elastic() or ranks is None or not ranks.included() or ranks.size() == 1:
            return None
        from ..horovod.entry import Announcement as HorovodAnnouncement

        return HorovodAnnouncement(optimizer, statements)

    def _clock(self) -> int:
        return self._steps_seen

    def _counts(self) -> bool:
        # Of the two calls that torch's hooks see of one, this is the inner one.
        return any(frame.f_code is self._step_code for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
