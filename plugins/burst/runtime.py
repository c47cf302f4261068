"""Burst: trains a model whose layers are on as many ranks as a plan gives them."""

from __future__ import annotations

import atexit
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.config import Config
from bytesched.errors import MismatchError, PluginError
from bytesched.observe import Observers
from bytesched.plugins.burst.background import Background
from bytesched.plugins.burst.branched import Branched
from bytesched.plugins.burst.groups import SharedObserver, broadcast_from, open_session
from bytesched.plugins.burst.moves import Move, Moves, move, samples_at
from bytesched.plugins.c10d import open_group
from bytesched.plugins.observing import observers_of
from bytesched.plugins.session import Session

__all__ = ["Burst"]

log = logging.getLogger("bytesched")

#: instances are numbered in the order in which they are made, which is the same on all ranks
_number = itertools.count()

_Loss = Callable[[Tensor, Tensor], Tensor]
#: item, where it is, name
_Item = tuple[nn.Module, Place | PlacedBranches, str]


class Burst(nn.Module):
    """A model on the ranks that a plan gives its layers.

    Gives what data parallelism gives, up to rounding: gradients are those of the mean loss of the
    global batch. Each layer lives on its own ranks; elsewhere its parameters are stale until
    ``gather()``. Collective over all ranks, and so is every ``step``.

    Args:
        model: layers in a row, some of which may be `Branched`.
        plan: where each of them is, such as `bytesched.burst.planfile.load_plan` returns.
        optimizer: makes an optimizer for some parameters; called once per set of ranks.
        loss: the mean loss of outputs and targets.
        fields: as `bytesched.wrap` takes them.

    Raises `PluginError` for what cannot be run, `ConfigError` for a wrong field.
    """

    def __init__(
        self,
        model: nn.Sequential,
        plan: Plan,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss: _Loss,
        **fields: Any,
    ) -> None:
        super().__init__()
        if not dist.is_available() or not dist.is_initialized():
            raise PluginError("torch.distributed is not initialized: call init_process_group first")
        config = Config.load(**fields)
        world = dist.distributed_c10d._get_default_group()
        self.model = model
        self.plan = plan
        self.optimizers: list[torch.optim.Optimizer] = []
        self._loss = loss
        self._rank, self._size = world.rank(), world.size()
        self._anchor = torch.zeros((), requires_grad=True)
        self._ways: dict[tuple[Place, Place, str, int], tuple[Move, Move]] = {}
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._sessions: dict[Place, Session] = {}
        self._background: Background | None = None
        self._steps = 0
        self._closed = False
        placed = list(_placed(_items(model, plan, "")))
        self._check(placed)
        name = f"burst{next(_number)}"
        moving = open_group(world, "gloo", name=f"{name}/moves", timeout_s=config.timeout_s)
        self._group = moving
        said = moving.gather_text("plan", repr(plan))
        if len(set(said)) > 1:
            other = next(rank for rank, text in enumerate(said) if text != said[0])
            moving.close()
            raise MismatchError(
                f"rank 0 and rank {other} have different plans: give every rank the same one"
            )
        broadcast_from(
            moving, 0, itertools.chain(model.parameters(), model.buffers()), "the first broadcast"
        )
        self._observers = observers_of(moving, config)
        shared = Observers([SharedObserver(self._observers)] if self._observers else [])
        self._moves = Moves(moving, shared)
        try:
            self._open(placed, optimizer, config, name)
        except BaseException:
            self.close()
            raise
        # Threads and connections must end before the interpreter does.
        atexit.register(self.close)

    def _check(self, placed: Sequence[tuple[nn.Module, Place, str]]) -> None:
        for module, place, name in placed:
            if place.first + place.width > self._size:
                raise PluginError(
                    f"{name} is planned for ranks {place.first} to {place.first + place.width - 1}"
                    f", and there are {self._size} ranks"
                )
            for part in module.modules():
                if isinstance(part, nn.modules.batchnorm._BatchNorm):
                    raise PluginError(
                        f"{name} has {type(part).__name__}, which normalises over the samples of "
                        "one rank, and a plan changes how many these are: use nn.GroupNorm"
                    )
        devices = {parameter.device.type for parameter in self.model.parameters()}
        if devices != {"cpu"}:
            raise PluginError(f"a plan runs on the CPU, and the model is on {sorted(devices)}")
        owners: dict[int, str] = {}
        for module, _, name in placed:
            for parameter in module.parameters():
                if owners.setdefault(id(parameter), name) != name:
                    raise PluginError(
                        f"{owners[id(parameter)]} and {name} share a parameter, and a parameter "
                        "lives with one layer"
                    )

    def _open(
        self,
        placed: Sequence[tuple[nn.Module, Place, str]],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        config: Config,
        name: str,
    ) -> None:
        """Optimizers, and sessions for the layers that are on several ranks."""
        by_place: dict[Place, list[tuple[str, nn.Parameter]]] = {}
        for module, place, layer in placed:
            named = [(f"{layer}.{n}", p) for n, p in module.named_parameters() if p.requires_grad]
            by_place.setdefault(place, []).extend(named)
        for place, named in by_place.items():
            base = dist.new_group(list(place.devices)) if place.width > 1 and named else None
            if self._rank not in place.devices or not named:
                continue
            mine = optimizer([parameter for _, parameter in named])
            self.optimizers.append(mine)
            if base is not None:
                shared = Observers([SharedObserver(self._observers)] if self._observers else [])
                assert isinstance(base, dist.ProcessGroup)
                # Only its store is used, by groups of the session's own.
                self._sessions[place] = open_session(
                    self, named, mine, place, base, config, shared, name
                )
                dist.destroy_process_group(base)

    # -- training ----------------------------------------------------------------------

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Trains on one global batch; the mean loss of the samples that this rank ended with.

        None on ranks that the last layer is not on. Every rank is given the whole batch, of which
        it reads only its own samples. An error ends the training of all ranks.
        """
        if self._background is not None:
            self._background.iteration_begins()
        try:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            began_ns = perf_counter_ns()
            outputs: Tensor = self(inputs)
            turn_ns = perf_counter_ns()
            here = samples_at(self._last, self._rank, len(inputs))
            loss = self._loss(outputs, targets[here.start :: here.step]) if here else None
            (outputs.sum() * 0 if loss is None else loss).backward()
            end_ns = perf_counter_ns()
            for optimizer in self.optimizers:
                optimizer.step()
        except BaseException as error:
            self.fail(error)
            raise
        self._steps += 1
        if self._observers:
            self._observers.on_span("forward", "forward", began_ns, turn_ns)
            self._observers.on_span("backward", "backward", turn_ns, end_ns)
            self._observers.on_step(self._steps, perf_counter_ns())
        return None if loss is None else loss.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the samples that this rank has at the last layer."""
        batch = len(inputs)
        items = list(_items(self.model, self.plan, ""))
        if not self._shapes:
            self._find_shapes(items, inputs)
        for _, place, name in _placed(iter(items)):
            if batch % place.width:
                raise PluginError(
                    f"{batch} samples cannot be split over {place.width} ranks: {name}"
                )
        first = cast(Place, items[0][1])
        here = samples_at(first, self._rank, batch)
        mine = inputs[here.start :: here.step] if here else inputs[:0]
        return self._run(items, mine, first, batch)[0]

    @property
    def _last(self) -> Place:
        return _end(self.plan[-1])

    def _run(
        self, items: Sequence[_Item], x: Tensor, before: Place, batch: int
    ) -> tuple[Tensor, Place]:
        """What comes out of some items, and where it is."""
        for module, placed, name in items:
            if isinstance(placed, Place):
                x = self._moved(x, before, placed, batch, name)
                before = placed
                x = module(x) if self._rank in placed.devices else self._absent(x, name)
                continue
            assert isinstance(module, Branched)
            x = self._run_branches(module, placed, name, x, before, batch)
            before = placed.join
        return x, before

    def _run_branches(
        self,
        module: Branched,
        placed: PlacedBranches,
        name: str,
        x: Tensor,
        before: Place,
        batch: int,
    ) -> Tensor:
        branches = [
            list(_items(cast(nn.Sequential, branch), plan, f"{name}.branches.{index}."))
            for index, (branch, plan) in enumerate(
                zip(module.branches, placed.branches, strict=True)
            )
        ]
        # All ways in before any branch is computed: the ranks of other lanes wait for them.
        entered = []
        for items in branches:
            entry = _end(items[0][1]) if items else before
            where = items[0][2] if items else ""
            entered.append((self._moved(x, before, entry, batch, where), entry))
        left = [
            self._run(items, y, entry, batch)
            for items, (y, entry) in zip(branches, entered, strict=True)
        ]
        return module.join(
            [
                self._moved(y, end, placed.join, batch, f"{name}.join{index}")
                for index, (y, end) in enumerate(left)
            ]
        )

    def _moved(self, x: Tensor, source: Place, target: Place, batch: int, name: str) -> Tensor:
        if source == target:
            return x
        key = (source, target, name, batch)
        if key not in self._ways:
            index = 2 * len(self._ways)
            there = Move.between(source, target, batch, self._rank, name=f"to {name}", index=index)
            back = Move.between(
                target, source, batch, self._rank, name=f"from {name}", index=index + 1
            )
            self._ways[key] = there, back
        scale = source.width / target.width
        return move(x, self._anchor, self._moves, *self._ways[key], scale)

    def _absent(self, x: Tensor, name: str) -> Tensor:
        """No samples, as if the layer had computed them: keeps the chain for backward whole."""
        shape, dtype = self._shapes[name]
        return x.reshape(0, *shape).to(dtype)

    def _find_shapes(self, items: Sequence[_Item], inputs: Tensor) -> None:
        """What each layer gives for one sample; a rank needs it for layers that it does not run."""

        def walk(items: Sequence[_Item], x: Tensor) -> Tensor:
            for module, placed, name in items:
                if isinstance(placed, Place):
                    x = copy.deepcopy(module).to("meta")(x)
                else:
                    assert isinstance(module, Branched)
                    parts = zip(module.branches, placed.branches, strict=True)
                    x = module.join(
                        [
                            walk(
                                list(
                                    _items(
                                        cast(nn.Sequential, branch), plan, f"{name}.branches.{n}."
                                    )
                                ),
                                x,
                            )
                            for n, (branch, plan) in enumerate(parts)
                        ]
                    )
                self._shapes[name] = x.shape[1:], x.dtype
            return x

        with torch.no_grad():
            walk(items, inputs[:1].to("meta"))

    # -- from outside ------------------------------------------------------------------

    def share(self, background: Background) -> None:
        """Lets a job run while this rank waits for samples; on all ranks before the same step."""
        self._background = background
        background.observers = self._observers
        self._moves.idle = background.gap

    def gather(self) -> None:
        """Every rank's model has every parameter's value; collective."""
        for session in self._sessions.values():
            session.flush()
        for module, place, name in _placed(_items(self.model, self.plan, "")):
            tensors = itertools.chain(module.parameters(), module.buffers())
            broadcast_from(self._group, place.first, tensors, f"gathering {name}")

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank."""
        self._group.leave_note(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self._moves.fail(error)
        for session in self._sessions.values():
            session.fail(error)

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the start: of the moves, and of gradients as ``<name>/<ranks>``."""
        figures: dict[str, int | float | str] = {
            "move_bytes": self._moves.bytes,
            "move_wait_ms": self._moves.wait_ns / 1e6,
        }
        for place, session in self._sessions.items():
            ranks = f"{place.first}-{place.first + place.width - 1}"
            figures |= {f"{name}/{ranks}": value for name, value in session.stats().items()}
        return figures

    def close(self) -> None:
        """Applies the last step, if all went well, and stops every thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for session in self._sessions.values():
            try:
                if session.error is None and self._moves.error is None:
                    session.flush()
            except Exception:
                log.exception("the last step could not be applied")
            session.close(release_parameters=session.error is None)
        self._moves.shut_down()
        self._observers.close()

    def __enter__(self) -> Burst:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.fail(error)
        self.close()


def _items(chain: nn.Sequential, plan: Plan, prefix: str) -> Iterator[_Item]:
    """The items of a chain with their places. Raises PluginError if the plan is another's."""
    if len(chain) != len(plan):
        raise PluginError(
            f"the plan has {len(plan)} layers for {prefix or 'the model'}, which has {len(chain)}"
        )
    for (name, module), placed in zip(chain.named_children(), plan, strict=True):
        if isinstance(module, Branched) is isinstance(placed, Place):
            raise PluginError(f"{prefix}{name}: branches where the plan has a layer, or reverse")
        if isinstance(placed, PlacedBranches):
            assert isinstance(module, Branched)
            if len(module.branches) != len(placed.branches):
                raise PluginError(
                    f"the plan has {len(placed.branches)} branches for {prefix}{name}, which has "
                    f"{len(module.branches)}"
                )
        yield module, placed, f"{prefix}{name}"


def _placed(items: Iterator[_Item]) -> Iterator[tuple[nn.Module, Place, str]]:
    """Every layer with its place, also those in branches."""
    for module, placed, name in items:
        if isinstance(placed, Place):
            yield module, placed, name
            continue
        assert isinstance(module, Branched)
        for index, (branch, plan) in enumerate(zip(module.branches, placed.branches, strict=True)):
            prefix = f"{name}.branches.{index}."
            yield from _placed(_items(cast(nn.Sequential, branch), plan, prefix))


def _end(placed: Place | PlacedBranches) -> Place:
    return placed if isinstance(placed, Place) else placed.join
