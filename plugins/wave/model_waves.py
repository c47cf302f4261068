"""Model-parallel waves: every rank keeps its batch, and the stages of the model come to it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.config import Config, warn_of_unused
from bytesched.errors import PluginError, SchedulerClosed
from bytesched.link.sizes import RULES
from bytesched.log import show

from ..agree import settings
from ..c10d.joining import broadcast, joining
from ..failures import Progress
from .cutting import cut, refuse_uncuttable
from .stage import Cargo, Stage, visits
from .traffic import Traffic

log = logging.getLogger("bytesched")

_USED: Final = frozenset({"partition_bytes", "timeout_s", "timeline", "log_level"})

#: as in torch.nn.utils.clip_grad_norm_
_SMALL: Final = 1e-6
#: instances are numbered in the order of their making, which is the same on all ranks
_number = itertools.count()


class ModelWaves:
    """Trains a model of which each rank holds one stage, with a batch on every rank.

    The stages come to each rank in order, forwards and then backwards, so that all ranks
    compute at the same time, each on its own batch; gradients go home with the stages, and
    are applied there, once per step (Wavelet, Wang et al., MLSys 2021: model-parallel tick-tock).
    The step has the results of gradient accumulation over the batches of all ranks, in their
    order, in one process. Gradients are set to none first; that of a parameter that no rank's batch
    uses stays none.

    Args:
        model: a chain of layers on the CPU, the same on all ranks; each passes one tensor on.
            All ranks get rank 0's weights. Weights are empty where they are not at home.
        optimizer: of all its parameters; steps those at home.
        loss_fn: ``loss_fn(output, targets)`` returns the mean loss of a batch.
        inputs: a batch like those to come, to measure the layers with.
        update: called on every rank in place of ``optimizer.step()``, with the gradients at home.
            What looks at all gradients is `clip_grad_norm_` and `unscale_` of this object.
        fields: settings of ``bytesched.wrap``: ``partition_bytes``, ``timeout_s``, ``timeline``
            and ``log_level`` are used; a warning names others that were given.

    Raises PluginError for what cannot be cut, and MismatchError if ranks disagree. Collective.
    """

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Tensor, Any], Tensor],
        inputs: Tensor,
        *,
        update: Callable[[], object] | None = None,
        **fields: Any,
    ) -> None:
        config = Config.load(**fields)
        if not dist.is_initialized() or dist.get_world_size() < 2:
            raise PluginError("stages travel between at least 2 ranks of torch.distributed")
        show(config.log_level, dist.get_rank())
        if dist.get_rank() == 0:
            warn_of_unused(config, _USED, "ModelWaves")
        base = dist.distributed_c10d._get_default_group()
        with joining(base, f"stages{next(_number)}", config) as ranks:
            self._group = ranks.open("data")
            self.rank = self._group.rank
            refuse_uncuttable(model, optimizer, self._group.size)
            named = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters()]
            ranks.agree([*named, *settings(config)])
            broadcast(self._group, itertools.chain(model.parameters(), model.buffers()))
            #: where the chain is cut
            self.bounds = cut(self._group, model, inputs)
            layers = list(model)
            self.stages = [
                Stage(index, nn.Sequential(*layers[start:stop]), is_home=index == self.rank)
                for index, (start, stop) in enumerate(itertools.pairwise(self.bounds))
            ]
            self._observers = ranks.observers()
        self._names = list(model._modules)
        at_home = {id(parameter) for parameter in self.stages[self.rank].parameters}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in at_home]
        self._optimizer = optimizer
        self._update = update
        self._loss_fn = loss_fn
        self._progress = Progress(self._group)
        self._traffic = Traffic(
            self._group,
            self.stages,
            self._progress,
            self._observers,
            chunk_bytes=RULES["stages"].sizes(config.partition_bytes)[0],
        )
        self._steps = 0
        self._step_s = self._waited_s = 0.0
        self._closed = False

    def step(self, inputs: Tensor, targets: Any) -> Tensor:
        """Trains on the batches of all ranks; returns the mean loss of this rank's."""
        began_s = perf_counter()
        with self._ending_all("step"):
            loss = self._train(inputs, targets)
        self._steps += 1
        self._step_s += perf_counter() - began_s
        self._observers.on_step(self._steps, perf_counter_ns())
        return loss

    def predict(self, inputs: Tensor) -> Tensor:
        """The model's output for this rank's batch, without gradients; collective."""
        with self._ending_all("predict"), torch.no_grad():
            self._traffic.begin(train=False)
            x = inputs
            for stage in self.stages:
                forward = partial(stage.module, x)
                x = self._visit(Cargo.FORWARD, stage.index, forward)
                self._traffic.used(Cargo.FORWARD, stage.index)
            self._traffic.end()
        return x

    def state_dict(self) -> dict[str, Tensor]:
        """All weights, and this rank's buffers, under the model's names; collective.

        The only time when a rank holds the whole model.
        """
        found: dict[str, Tensor] = {}
        with self._ending_all("state_dict"):
            for index, stage in enumerate(self.stages):
                if not stage.is_home:
                    stage.come()
                self._group.broadcast(
                    [stage.flat], root=index, task=f"the weights of stage {index}"
                )
                for offset, layer in enumerate(stage.module):
                    prefix = f"{self._names[self.bounds[index] + offset]}."
                    found |= {prefix + n: v.clone() for n, v in layer.state_dict().items()}
                if not stage.is_home:
                    stage.leave()
        return found

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``; returns what it was.

        In ``update``; collective.
        """
        parameters = self.stages[self.rank].parameters
        gradients = [p.grad for p in parameters if p.grad is not None]
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        self._group.wait(self._group.all_reduce(total), task="the norm of all gradients")
        norm = total.sqrt()
        factor = torch.clamp(max_norm / (norm + _SMALL), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return norm.to(parameters[0].dtype)

    def unscale_(self, scaler: torch.amp.GradScaler) -> None:
        """As ``scaler.unscale_`` of the optimizer; all ranks skip a step that one has to skip.

        In ``update``, before ``scaler.step``; collective.
        """
        scaler.unscale_(self._optimizer)
        if not scaler.is_enabled():
            return
        # As FSDP's scaler does: nothing public has them.
        found: dict[Any, Tensor] = scaler._found_inf_per_device(self._optimizer)
        anywhere = torch.stack([torch.zeros(()), *(value.cpu() for value in found.values())]).amax()
        self._group.wait(self._group.largest(anywhere), task="whether all gradients are finite")
        found[torch.device("cpu")] = anywhere

    @contextmanager
    def _ending_all(self, what: str) -> Iterator[None]:
        """Around what all ranks do: an error of one ends the waves of all."""
        if self._closed:
            raise SchedulerClosed(
                f"rank {self.rank}: {what}() of closed ModelWaves; make new ones"
            ) from self._progress.error
        self._progress.check()
        try:
            yield
        except BaseException as error:
            self._progress.fail(error)
            raise

    def stats(self) -> dict[str, int | float | str]:
        """Figures of the steps so far, means per step where they are times or sent bytes.

        ``peak_bytes``: the most of weights and gradients that this rank held, its own included,
        without activations and the optimizer's state; ``bound_bytes``: what that cannot exceed.
        """
        steps = max(self._steps, 1)
        return {
            "steps": self._steps,
            "step_ms": 1e3 * self._step_s / steps,
            "waited_ms": 1e3 * self._waited_s / steps,
            "sent_bytes_per_step": self._traffic.sent_bytes / steps,
            "peak_bytes": self._traffic.rooms.peak_bytes,
            "bound_bytes": self._traffic.rooms.bound_bytes,
            "model_bytes": sum(stage.weight_bytes for stage in self.stages),
            "home_bytes": self.stages[self.rank].weight_bytes,
            "bounds": " ".join(map(str, self.bounds)),
            "rank": self.rank,
            "world_size": self._group.size,
        }

    def close(self) -> None:
        """Ends threads and connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._traffic.close()
        self._group.close()
        self._observers.close()

    def _train(self, inputs: Tensor, targets: Any) -> Tensor:
        ranks = self._group.size
        for stage in self.stages:
            stage.drop_gradients()
        self._traffic.begin(train=True)
        entries: list[Tensor] = []
        exits: list[Tensor] = []
        loss = torch.empty(0)
        gradient: Tensor | None = None
        for cargo, index in visits(ranks):
            stage = self.stages[index]
            if cargo is Cargo.FORWARD:
                entries.append(exits[-1].detach().requires_grad_() if exits else inputs)
                # A first layer that works in place must not overwrite a leaf.
                entry = entries[-1].clone() if index else inputs
                exits.append(self._visit(cargo, index, partial(stage.module, entry)))
                del entry
                self._traffic.used(cargo, index)
                if index == ranks - 1:
                    loss = self._loss_fn(exits[-1], targets)
            else:
                # Each layer's activations are let go of with its gradient.
                output = exits.pop() if index < ranks - 1 else loss / ranks
                if not output.requires_grad:
                    raise PluginError(
                        f"nothing in stage {index} requires a gradient: train the front layers "
                        "too, or take them out of the model"
                    )
                self._visit(cargo, index, partial(output.backward, gradient))
                if index == ranks - 1:
                    exits.pop()
                gradient = entries.pop().grad
                own = stage.take_gradients()
                self._traffic.used(cargo, index)
                began_ns = perf_counter_ns()
                self._traffic.add(index, own)
                self._waited(f"gradients {index}", began_ns)
        began_ns = perf_counter_ns()
        home = self.stages[self.rank]
        home.set_gradients(self._traffic.total())
        self._traffic.end()
        self._waited("gradients of all ranks", began_ns)
        if self._update is None:
            self._optimizer.step()
        else:
            self._update()
        home.drop_gradients()
        return loss.detach()

    def _visit(self, cargo: Cargo, index: int, compute: Callable[[], Any]) -> Any:
        began_ns = perf_counter_ns()
        self._traffic.wait_for(cargo, index)
        self._waited(f"stage {index}", began_ns)
        here_ns = perf_counter_ns()
        result = compute()
        if self._observers:
            track = "forward" if cargo is Cargo.FORWARD else "backward"
            self._observers.on_span(track, f"stage {index}", here_ns, perf_counter_ns())
        return result

    def _waited(self, by: str, began_ns: int) -> None:
        """The user's thread has waited since ``began_ns``."""
        now_ns = perf_counter_ns()
        self._waited_s += (now_ns - began_ns) / 1e9
        if self._observers:
            self._observers.on_span("wait", by, began_ns, now_ns)
