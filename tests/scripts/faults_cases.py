"""What the ranks of the fault tests do: train until something goes wrong at an exact moment."""

from __future__ import annotations

import atexit
import faulthandler
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from faults_runner import folder, tell
from rank_worker import signals
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.plugins.planned import guard
from bytesched.urgency import URGENCY

# A stopped peer is noticed after that.
TIMEOUT_S = 4.0
# Where nothing is stopped: beyond the hard limit of a scenario, so that no wait can help itself.
NO_TIMEOUT_S = 300.0
STEPS = 6
# Step 0 is the warm-up; here the update of the step before is the third that is deferred.
FAULT_STEP = 3

FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda: _raise(ValueError("boom")),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "terminate": lambda: signal.raise_signal(signal.SIGTERM),
}


class Net(nn.Module):
    """Four layers; `at` is called with the name of each moment it passes."""

    def __init__(self, *, buffers: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if buffers else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(8, 16), *(nn.Linear(16, 16) for _ in range(3))])
        self.at: Callable[[str], object] = lambda moment: None

    @property
    def first_weight(self) -> Tensor:
        """The one whose gradient is complete last."""
        layer = self.layers[0]
        assert isinstance(layer, nn.Linear)
        return layer.weight

    def forward(self, x: Tensor) -> Tensor:
        self.at("in_forward")
        for index, layer in enumerate(self.layers):
            x = self.norm(torch.tanh(layer(x)))
            if x.requires_grad and index in (0, 2):
                moment = "before_last_gradients" if index == 0 else "in_backward"
                x.register_hook(lambda grad, moment=moment: self.at(moment))
        return x


def net(*, buffers: bool = False) -> Net:
    torch.manual_seed(3)
    return Net(buffers=buffers)


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(4, 8, generator=generator)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, **fields: Any) -> None:
    """With small chunks and a trace; what is left of the library is told at the very end."""
    # Functions registered first run last, so this one sees what the library's own left behind.
    atexit.register(_tell_threads_left)
    usual: dict[str, Any] = {"partition_bytes": 256, "credit_bytes": 512, "timeout_s": NO_TIMEOUT_S}
    bytesched.wrap(optimizer, model, timeline=str(folder()), **usual | fields)


def _tell_threads_left() -> None:
    left = threads()
    tell(threads_left=left)
    if left:
        faulthandler.dump_traceback()


def threads() -> list[str]:
    """All but this one."""
    mine = threading.current_thread()
    return [thread.name for thread in threading.enumerate() if thread is not mine]


def named(error: BaseException) -> dict[str, object]:
    return {
        "error": type(error).__name__,
        "ours": isinstance(error, bytesched.BytesschedError),
        "message": str(error),
    }


class Script:
    """The usual training loop, in which `at` is called at every moment of step `fault_step`."""

    def __init__(
        self,
        at: Callable[[str], object] = lambda moment: None,
        *,
        fault_step: int = FAULT_STEP,
        buffers: bool = False,
    ) -> None:
        self.at = at
        self.fault_step = fault_step
        self.step = 0
        self.is_stepping = False
        #: every rank waits for every update
        self.flushes = False
        self.model = net(buffers=buffers)
        self.model.at = self._reached
        self.ddp, self.optimizer = self.begun()

    def begun(self) -> tuple[Any, Any]:
        """What is called in place of the model, and its optimizer."""
        return DistributedDataParallel(self.model), sgd(self.model)

    def inputs(self, step: int) -> Tensor:
        return inputs(step)

    def wrap(self, **fields: Any) -> Script:
        wrap(self.optimizer, self.ddp, **fields)
        return self

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def _reached(self, moment: str) -> None:
        if self.step == self.fault_step:
            self.at(moment)

    def train(self, steps: int = STEPS) -> None:
        for self.step in range(steps):
            self.one_step()

    def train_through(self, steps: int = STEPS) -> None:
        """The same, up to the last update."""
        self.train(steps)
        bytesched.flush()

    def one_step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.ddp(self.inputs(self.step)).square().mean()
        self._reached("before_backward")
        loss.backward()
        self._reached("after_backward")
        self.is_stepping = True
        self.optimizer.step()
        self.is_stepping = False
        self._reached("after_step")
        if self.flushes:
            bytesched.flush()
            dist.barrier()
            self._reached("after_last_update")

    def hook_user(self, moment: str) -> None:
        """Adds a hook of the user's that reaches `moment`."""
        layer = self.model.layers[1]
        assert isinstance(layer, nn.Linear)
        if moment == "in_step_hook":
            self.optimizer.register_step_pre_hook(lambda *_: self._reached(moment))
        elif moment == "in_module_hook":
            layer.register_forward_hook(lambda *_: self._reached(moment))
        elif moment == "in_gradient_hook":
            layer.weight.register_post_accumulate_grad_hook(lambda _: self._reached(moment))
        elif moment == "in_update":
            # A class whose functions were replaced steps whole, unless somebody vouches for it.
            bytesched.separable(torch.optim.SGD)
            # Of updates that do not run in `step()`.
            before("torch.optim.sgd", "sgd", lambda: self.is_stepping or self.at(moment))
        elif moment == "after_last_update":
            self.flushes = True
        elif moment == "in_measurement":
            # Of the link, for a tuner.
            before("bytesched.plugins.planned.tuned", "probes", lambda: self.at(moment))


def before(place: str, name: str, act: Callable[[], object]) -> None:
    owner = pkgutil.resolve_name(place)
    real = getattr(owner, name)

    def acted(*args: Any, **kwargs: Any) -> Any:
        act()
        return real(*args, **kwargs)

    setattr(owner, name, acted)


def _raise(error: Exception) -> None:
    raise error


def told(train: Callable[[], object]) -> None:
    """Run `train`; what it raises is told, and raised."""
    try:
        train()
    except BaseException as error:
        tell(**named(error))
        raise


def train_until_fault(
    victim: int,
    fault: str,
    moment: str,
    fault_step: int = FAULT_STEP,
    fields: Mapping[str, Any] = MappingProxyType({}),
    buffers: bool = False,
) -> None:
    """All ranks train; `fault` befalls rank `victim` at `moment` of step `fault_step`.

    In the middle of backward another rank is there as well. From `step()` on, up to the next
    forward pass, the other ranks still owe their last gradients: the update is outstanding. With
    shard=True all of them are in `step()` then.
    """
    outstanding = moment in ("after_step", "in_next_forward", "in_update")
    is_alone = outstanding and "shard" not in fields
    struck = past_step = False

    def at_other(reached: str) -> None:
        if reached == "in_backward":
            signals().set("other rank in backward")
        elif reached == "before_last_gradients" and is_alone:
            signals().wait("victim is past step")

    def at_victim(reached: str) -> None:
        nonlocal struck, past_step
        if reached == "after_step":
            past_step = True
            script.fault_step += moment == "in_next_forward"
            signals().set("victim is past step")
        if struck or reached != moment.replace("next_", "") or past_step < outstanding:
            return
        struck = True
        if moment == "in_backward":
            signals().wait("other rank in backward")
        tell(order=bytesched.stats(script.optimizer)["order"])
        FAULTS[fault]()

    at = at_victim if dist.get_rank() == victim else at_other
    script = Script(at, fault_step=fault_step, buffers=buffers)
    script.hook_user(moment)
    script.wrap(timeout_s=timeout_of(fault), **fields)
    told(lambda: script.train_through(fault_step + 3))


def timeout_of(fault: str) -> float:
    """No survivor of anything but a stopped rank needs one."""
    return TIMEOUT_S if fault == "stop" else NO_TIMEOUT_S


def fails_in_an_answer(victim: int, fault: str) -> None:
    """`fault` befalls rank `victim` while it answers for the part of the state that it owns."""
    script = Script().wrap(timeout_s=timeout_of(fault), shard=True)
    script.train(3)
    if dist.get_rank() != victim:
        signals().wait("an answer fails")
        told(script.optimizer.state_dict)
        return
    before("bytesched.plugins.zero1.states:States", "here", FAULTS[fault])
    signals().set("an answer fails")
    # Its script goes on, and waits for gradients of the one that asks.
    told(lambda: script.train(2))


def fails_in_a_turn_of_ddp(victim: int, fault: str) -> None:
    """`fault` befalls rank `victim` in its first backward pass with DDP by itself."""

    def at(reached: str) -> None:
        if reached == "in_backward" and dist.get_rank() == victim:
            FAULTS[fault]()

    def turn_begins() -> None:
        script.fault_step = script.step

    vars(guard).update(_SETTLED=2, _COUNTED_FIRST=1)
    before("bytesched.plugins.planned.guard:Guard", "plain_begins", turn_begins)
    script = Script(at, fault_step=-1).wrap()
    told(lambda: script.train_through(20))


def fails_in_a_section(victim: int, fault: str) -> None:
    script = Script().wrap(timeout_s=timeout_of(fault))
    script.train(3)

    def section() -> None:
        with bytesched.urgent():
            if dist.get_rank() == victim:
                FAULTS[fault]()
            script.train(2)

    try:
        told(section)
    finally:
        assert not URGENCY.is_held
