"""Burst: trains a model whose layers are on as many ranks as a plan gives them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from bytesched.burst.cost import Place, Plan
from bytesched.config import Config, warn_of_unused
from bytesched.errors import PluginError, SchedulerClosed
from bytesched.log import show

from ..agree import settings
from ..c10d.joining import joining
from ..ending import at_exit, died_of, make_exit_fail, not_at_exit
from ..planned.hooked_session import HookedSession
from ..routes.opening import store_of
from .background import Background
from .groups import made_on_all_ranks, open_session, shared_observers
from .moves import Moves, samples_at
from .structure import Walk, check, items_of, layers_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bytesched.config import ConfigFields

log = logging.getLogger("bytesched")

_USED: Final = frozenset(
    {
        *("policy", "partition_bytes", "credit_bytes", "compression", "cross_barrier"),
        *("timeout_s", "timeline", "log_level"),
    }
)

#: instances are numbered in the order in which they are made, which is the same on all ranks
_number = itertools.count()

_Loss = Callable[[Tensor, Tensor], Tensor]


class Burst(nn.Module):
    """A model on the ranks that a plan gives its layers.

    Gives what data parallelism gives, up to rounding: gradients are those of the mean loss of the
    global batch. Each layer lives on its own ranks; elsewhere its parameters are stale until
    ``gather()``. Collective over all ranks, and so is every ``step``.

    Args:
        model: layers in a row, some of which may be `Branched`.
        plan: where each of them is, such as `plan_for` returns.
        optimizer: makes an optimizer for some parameters; called once per set of ranks.
        loss: the mean loss of outputs and targets.
        fields: as `bytesched.wrap` takes them; a warning names those that do nothing here.

    Raises `PluginError` for what cannot be run, `ConfigError` for a wrong field, `MismatchError` if
    the ranks have different plans or models.
    """

    def __init__(
        self,
        model: nn.Sequential,
        plan: Plan,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss: _Loss,
        **fields: Unpack[ConfigFields],
    ) -> None:
        super().__init__()
        if not dist.is_available() or not dist.is_initialized():
            raise PluginError("torch.distributed is not initialized: call init_process_group first")
        config = Config.load(**fields)
        world = dist.distributed_c10d._get_default_group()
        show(config.log_level, world.rank())
        if world.rank() == 0:
            warn_of_unused(config, _USED, "Burst")
        config = replace(config, tune=False)
        check(model, plan, world.size())
        self.model = model
        self.plan = plan
        self.optimizers: list[torch.optim.Optimizer] = []
        self._loss = loss
        self._rank = world.rank()
        self._sessions: dict[Place, HookedSession] = {}
        self._background: Background | None = None
        self._steps = 0
        self._closed = False
        name = f"burst{next(_number)}"
        with joining(world, name, config) as ranks:
            self._group = ranks.open("moves")
            named = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
            ranks.agree(
                [
                    *(f"{item}: {placed}" for _, placed, item in items_of(model, plan, "")),
                    *(f"{item} {tuple(t.shape)} {t.dtype}" for item, t in named.items()),
                    *settings(config),
                ]
            )
            self._group.broadcast(named.values(), task="the first broadcast")
            self._observers = ranks.observers()
        self._moves = Moves(self._group, shared_observers(self._observers))
        self._walk = Walk(model, plan, self._rank, self._moves)
        try:
            self._open(optimizer, config, store_of(world), name)
        except BaseException as error:
            self.fail(error)
            self.close()
            raise
        # Threads and connections must end before the interpreter does.
        at_exit(self._close_at_exit)

    def _open(
        self,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        config: Config,
        store: Store,
        name: str,
    ) -> None:
        """Optimizers, and sessions for the layers that are on several ranks."""
        by_place: dict[Place, list[tuple[str, nn.Parameter]]] = {}
        for module, place, layer in layers_of(items_of(self.model, self.plan, "")):
            named = [(f"{layer}.{n}", p) for n, p in module.named_parameters() if p.requires_grad]
            by_place.setdefault(place, []).extend(named)
        mine = {
            place: [parameter for _, parameter in named]
            for place, named in by_place.items()
            if named and self._rank in place.devices
        }
        made = made_on_all_ranks(
            self._group,
            lambda: {place: optimizer(p) for place, p in mine.items()},
            "its optimizers",
        )
        self.optimizers += made.values()
        for place, its in made.items():
            if place.width > 1:
                named, shared = by_place[place], shared_observers(self._observers)
                self._sessions[place] = open_session(
                    self, named, its, place, self._group, store, config, shared, name
                )
        # One that closed early would seem to be lost to those that still connect.
        self._group.gather_text("connected", "")

    # -- training ----------------------------------------------------------------------

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Trains on one global batch; the mean loss of the samples that this rank ended with.

        None on ranks that the last layer is not on. Every rank is given the whole batch, of which
        it reads only its own samples. An error ends the training of all ranks.
        """
        self._refuse_closed("step")
        if self._background is not None:
            self._background.iteration_begins()
        try:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            began_ns = perf_counter_ns()
            outputs: Tensor = self(inputs)
            turn_ns = perf_counter_ns()
            here = samples_at(self.plan[-1].end, self._rank, len(inputs))
            loss = self._loss(outputs, targets[here.start :: here.step]) if here else None
            if loss is not None:
                loss.backward()
            elif outputs.requires_grad:
                (outputs.sum() * 0).backward()  # takes part in the moves
            end_ns = perf_counter_ns()
            for optimizer in self.optimizers:
                optimizer.step()
        except BaseException as error:
            self.fail(error)
            raise
        if self._background is not None:
            self._background.iteration_ends()
        self._steps += 1
        if self._observers:
            self._observers.on_span("forward", "forward", began_ns, turn_ns)
            self._observers.on_span("backward", "backward", turn_ns, end_ns)
            self._observers.on_step(self._steps, perf_counter_ns())
        return None if loss is None else loss.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the samples that this rank has at the last layer."""
        self._refuse_closed("forward")
        return self._walk.run(inputs)

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise SchedulerClosed(
                f"rank {self._rank}: {what}() of a closed Burst; make a new one"
            ) from self._moves.progress.error

    # -- from outside ------------------------------------------------------------------

    def share(self, background: Background) -> None:
        """Lets a job run while this rank waits for samples; on all ranks before the same step."""
        self._background = background
        background.observers = self._observers
        self._moves.idle = background.gap

    def gather(self) -> None:
        """Every rank's model has every parameter's value; collective."""
        self._refuse_closed("gather")
        for session in self._sessions.values():
            session.flush()
        # Two threads on one Gloo group would end the process.
        self._moves.finish()
        for module, place, name in layers_of(items_of(self.model, self.plan, "")):
            tensors = itertools.chain(module.parameters(), module.buffers())
            self._group.broadcast(tensors, root=place.first, task=f"gathering {name}")

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank; the caller raises ``error`` now."""
        self._moves.progress.fail(error, is_raised=True)
        for session in self._sessions.values():
            session.fail(error)

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the start: of the moves, and of gradients as ``<name>/<ranks>``."""
        return {
            "move_bytes": self._moves.bytes,
            "move_wait_ms": self._moves.wait_ns / 1e6,
            **{
                f"{name}/{place.first}-{place.first + place.width - 1}": value
                for place, session in self._sessions.items()
                for name, value in session.stats().items()
            },
        }

    def close(self) -> None:
        """Applies the last step, if all went well, and stops every thread. Idempotent.

        Raises what kept the last step from being applied, when all is stopped.
        """
        if self._closed:
            return
        self._closed = True
        not_at_exit(self._close_at_exit)
        with ExitStack() as ending:
            ending.callback(self._observers.close)
            ending.callback(self._moves.shut_down)
            for session in reversed(self._sessions.values()):
                ending.callback(self._end, session)
            # Another rank may still be on its way to what this one has sent.
            error = self._moves.progress.error
            if error is None:
                self._moves.finish()
            elif not self._moves.progress.is_error_seen:
                raise error

    def _end(self, session: HookedSession) -> None:
        try:
            if session.error is None and self._moves.progress.error is None:
                session.flush()
            elif session.unseen_error is not None:
                raise session.unseen_error
        finally:
            session.close(release_parameters=session.error is None)

    def _close_at_exit(self) -> None:
        if (died := died_of()) is not None:
            self.fail(died)
        try:
            self.close()
        except Exception:
            log.exception("the last step could not be applied")
            make_exit_fail()

    def __enter__(self) -> Burst:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.fail(error)
        self.close()
