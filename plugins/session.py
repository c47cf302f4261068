"""One wrapped model: from its gradient hooks to the gates of the next forward pass."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic, perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from bytesched.config import Config
from bytesched.core import SchedulerCore
from bytesched.errors import PeerLost, PluginError, SchedulerTimeout, UnusedParameterError
from bytesched.observe import Observers
from bytesched.order import Following, Leading
from bytesched.plugins.c10d import C10dTransport, Group
from bytesched.plugins.control import Follower, Leader
from bytesched.plugins.first_use import FirstUse, StayingHook, gate
from bytesched.plugins.meter import Meter
from bytesched.plugins.pending import has_own_memory, hold, is_held, plain, release
from bytesched.plugins.plan import Bundle, Plan, Slot
from bytesched.plugins.streams import streams_for
from bytesched.plugins.update import Deferred, snapshot
from bytesched.plugins.updater import Updater
from bytesched.plugins.warmup import WarmUp
from bytesched.policy import named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask

__all__ = ["Session"]

log = logging.getLogger("bytesched")


class Session:
    """The life of one wrapped model.

    The first synchronised backward pass is the warm-up: it is reduced as a whole, while the order
    of first use and the link are learned. From the second on, chunks are sent as their gradients
    arrive, ``step()`` arms their updates, and the parameters guard themselves.

    Args:
        root: the module whose call is a forward pass (the DDP object, if there is one).
        slots: the parameters that are reduced, in registration order, the same on all ranks.
        config: the settings, partition and credit still 0 if they are to be chosen.
        data: the group that gradients travel on.
        control: the group that the leader's order travels on.
        sync: whether the backward pass of the forward pass that begins now is to be reduced.
        find_unused: True if parameters may get no gradient; None if the warm-up shall tell.
        static_graph: a parameter may be used several times, the same in each iteration.
    """

    def __init__(
        self,
        root: nn.Module,
        slots: Sequence[Slot],
        config: Config,
        *,
        data: Group,
        control: Group,
        sync: Callable[[], bool],
        find_unused: bool | None,
        static_graph: bool,
        observers: Observers,
    ) -> None:
        self.root = root
        self.config = config
        self.data = data
        self.control = control
        self.observers = observers
        self.meter = Meter(observers, len(slots))
        self.error: BaseException | None = None
        self._closed = False
        self._read_sync = sync
        self._sync = True
        self._find_unused = find_unused
        self._static_graph = static_graph
        self._slots = list(slots)
        self._by_id = {id(slot.parameter): slot for slot in slots}
        self._deferred: dict[int, Deferred] = {}
        self._undo: list[Callable[[], None]] = []
        #: guards everything that the scheduler's, the updater's and the user's thread share
        self._changed = threading.Condition()
        self._waiters = 0
        # - one round: one synchronised backward pass, or several that complete each other
        self._round_open = False
        self._callback_queued = False
        self._missing = 0
        self._outstanding = 0
        # - after the warm-up
        self.plan: Plan | None = None
        self._scheduler: Scheduler
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._updater: Updater
        self._streams = streams_for(slots[0].parameter.device)
        self._first_use = FirstUse(root, [slot.parameter for slot in slots])
        self._hook()

    # -- hooks -------------------------------------------------------------------------

    def _hook(self) -> None:
        for slot in self._slots:
            self._undo.append(
                slot.parameter.register_post_accumulate_grad_hook(
                    partial(self._on_grad, slot)
                ).remove
            )
        hook = StayingHook(self._before_forward)
        self._undo.append(self.root.register_forward_pre_hook(hook, prepend=True).remove)
        self._forward_hook = self.root.register_forward_hook(self._after_forward, always_call=True)
        self._undo.append(self._forward_hook.remove)

    def add_optimizer(self, optimizer: torch.optim.Optimizer, *, cross: bool) -> None:
        """Updates of ``optimizer`` are deferred from now on, if it may cross the barrier."""
        deferred = Deferred(optimizer, self.settle_all, cross=cross)
        for other in self._deferred.values():
            shared = deferred.parameter_ids() & other.parameter_ids() & self._by_id.keys()
            if shared:
                name = self._by_id[shared.pop()].name
                raise PluginError(f"parameter {name!r} is in two optimizers")
        self._deferred[id(optimizer)] = deferred
        if self.plan is not None:
            self._introduce(deferred)
        for handle in (
            optimizer.register_step_pre_hook(partial(self._before_step, deferred)),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(lambda _: self.settle_all()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle_all()),
            optimizer.register_load_state_dict_post_hook(lambda _: deferred.guard()),
        ):
            self._undo.append(handle.remove)
        self._undo.append(deferred.unguard)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Calls ``undo`` after every hook has been taken off."""
        self._undo.insert(0, undo)

    def _introduce(self, deferred: Deferred) -> None:
        for slot in self._slots:
            deferred.know(slot)

    # -- forward -----------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.check()
        self._sync = self._read_sync()
        self.meter.forward_begins()
        if self.plan is None:
            self._first_use.begin()
        elif self._outstanding and any(b.sending and not b.armed for b in self.plan.bundles):
            # Gradients that no step() has taken: backward would add to them on the wire.
            self.wait_reduced()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.plan is None:
            self._first_use.end()
        if torch.is_grad_enabled():
            self.meter.forward_ends()

    # -- backward ----------------------------------------------------------------------

    def _on_grad(self, slot: Slot, parameter: torch.Tensor) -> None:
        if not self._sync:
            return
        began_ns = perf_counter_ns()
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._after_backward)
        if not self._round_open:
            self._begin_round()
        slot.fired += 1
        if slot.fired != slot.expected:
            self._check_refire(slot)
            return
        self._missing -= 1
        slot.used = True
        if self.plan is None:
            return
        assert parameter.grad is not None
        grad = plain(parameter.grad)
        if grad.dtype is not slot.view.dtype or grad.device != slot.view.device:
            raise PluginError(
                f"the gradient of {slot.name!r} is {grad.dtype} on {grad.device}, it was "
                f"{slot.view.dtype} on {slot.view.device}: unwrap before the model is converted"
            )
        slot.grad = grad.detach() if grad.requires_grad else grad
        slot.unpacked = len(slot.chunks)
        self._source_ready(slot)
        self.meter.hook_ns += perf_counter_ns() - began_ns

    def _source_ready(self, slot: Slot) -> None:
        for chunk in slot.chunks:
            if chunk.notify_ready():
                self._chunk_ready(chunk)

    def _chunk_ready(self, chunk: CommTask) -> None:
        self._streams.backward_done(chunk)
        if self._follower is not None and not self._announced:
            self._announced = True
            self._follower.begin_iteration()
        self._scheduler.notify_ready(chunk)
        if self.observers:
            self.observers.on_flow("s", chunk.index, "backward", perf_counter_ns())

    _announced = False

    def _check_refire(self, slot: Slot) -> None:
        if self.plan is None and self._static_graph:
            return
        if slot.fired > slot.expected:
            raise PluginError(
                f"parameter {slot.name!r} got a second gradient in one round on rank "
                f"{self.data.rank}. Either it is used in several reentrant checkpoints, or "
                "backward() ran twice on one graph (use no_sync() or static_graph=True), or an "
                "earlier backward() was interrupted by an exception"
            )

    def _begin_round(self) -> None:
        self.check()
        if self.plan is not None:
            held = [s for b in self.plan.bundles if b.armed for s in b.slots if s.used]
            if held:
                raise PluginError(
                    f"backward() reached a new gradient while the update of {held[0].name!r} is "
                    f"outstanding on rank {self.data.rank}: its value was read by code that "
                    "cannot be seen from Python. Wrap with cross_barrier=False"
                )
            if self._outstanding:
                self._wait(lambda: not self._outstanding, "the previous round")
            for bundle in self.plan.bundles:
                bundle.sending = len(bundle.chunks)
            self._outstanding = len(self.plan.chunks)
            self._announced = self.plan.flags_reduced = False
        for slot in self._slots:
            slot.fired = 0
            slot.used = slot.taken = False
        self._missing = len(self._slots)
        self._round_open = True
        self.meter.backward_begins()

    def _after_backward(self) -> None:
        self._callback_queued = False
        if self._missing and self._find_unused is False:
            # Another loss may bring the rest; step() complains if none does.
            return
        if self.plan is None:
            self._warm_up()
        elif self._find_unused:
            self._close_round(self.plan)
        for slot in self._slots:
            if slot.used:
                if has_own_memory(slot.lazy):
                    slot.make_lazy(partial(self._settle_grad, slot))
                slot.parameter.grad = slot.lazy
        self._round_open = False
        self.meter.backward_ends()

    def _close_round(self, plan: Plan) -> None:
        """Sends zeros for parameters without a gradient; finds out who got one elsewhere."""
        missing = [slot for slot in self._slots if not slot.used]
        assert plan.used_flags is not None
        assert plan.flags_chunk is not None
        plan.used_flags.fill_(1)
        for position, slot in enumerate(plan.slots):
            if not slot.used:
                plan.used_flags[position] = 0
        if plan.flags_chunk.notify_ready():
            self._chunk_ready(plan.flags_chunk)
        for slot in missing:
            slot.grad = None
            self._source_ready(slot)
        if missing:
            self._wait(lambda: plan.flags_reduced, "the map of used parameters")
            for position, slot in enumerate(plan.slots):
                slot.used = bool(plan.used_flags[position])

    def _warm_up(self) -> None:
        self._first_use.close()
        warm = WarmUp(self.data, self.config, self._slots)
        plan = warm.reduce(self._first_use.order(), find_unused=self._find_unused)
        if self._find_unused is None:
            self._find_unused = warm.unused
        if self._static_graph:
            for slot in self._slots:
                slot.expected = max(1, slot.fired)
        self._activate(plan, warm)

    def _activate(self, plan: Plan, warm: WarmUp) -> None:
        self._slots = plan.slots
        for slot in plan.slots:
            slot.make_lazy(partial(self._settle_grad, slot))
            slot.settle = partial(self.settle, slot.bundle, slot.name)
        if not self.observers:
            # It could not be pickled with the module.
            self._forward_hook.remove()
        self._updater = Updater(self._changed, self._streams, self.meter, self._updated, self.fail)
        transport = C10dTransport(self.data, warm.packer, self._streams)
        leads = self.data.rank == 0
        self._credit_bytes = warm.credit_bytes
        queue = Leading(named_policy(self.config.policy)) if leads else Following()
        # Followers start what the leader's credit let through.
        credit_bytes = warm.credit_bytes if leads else 1 << 62
        if leads:
            replay = self.config.order == "replay" or (
                self.config.order == "auto" and self.data.size > 8
            )
            self._leader = Leader(self.control, len(plan.chunks), replay=replay)
        self._scheduler = Scheduler(
            SchedulerCore(queue, credit_bytes=credit_bytes),
            transport,
            announce=self._leader.announce if self._leader else lambda tasks: None,
            on_finish=self._on_finish,
            on_error=self.fail,
            observers=self.observers,
        )
        if not leads:
            self._follower = Follower(
                self.control,
                len(plan.chunks),
                ordered=self._scheduler.ordered,
                on_error=self._scheduler.fail,
            )
        self.plan = plan
        for deferred in self._deferred.values():
            self._introduce(deferred)
        self._raise_gates(plan)
        self.meter.active(plan, warm)
        if leads:
            log.info(
                "%s on %d ranks, partition %.0f KiB, credit %.0f KiB, policy %s, mode %s",
                plan,
                self.data.size,
                warm.partition_bytes / 1024,
                warm.credit_bytes / 1024,
                self.config.policy,
                self._mode(),
            )

    def _raise_gates(self, plan: Plan) -> None:
        names = {
            module: name or type(module).__name__ for name, module in self.root.named_modules()
        }
        used = {id(slot.parameter) for slot in plan.slots if slot.used}
        for module, parameters in self._first_use.gates(lambda p: id(p) in used).items():
            bundles = {self._by_id[id(p)].bundle for p in parameters if id(p) in self._by_id}
            ordered = sorted(bundles, key=lambda bundle: bundle.index)
            name = names.get(module, type(module).__name__)
            self._undo.append(gate(module, ordered, self.settle, name))

    # -- the scheduler's thread --------------------------------------------------------

    def _on_finish(self, chunk: CommTask) -> None:
        plan = self.plan
        assert plan is not None
        with self._changed:
            self._outstanding -= 1
            complete = []
            for bundle in plan.bundles_of[chunk.index]:
                bundle.sending -= 1
                if not bundle.sending and bundle.armed:
                    complete.append(bundle)
            if chunk is plan.flags_chunk:
                plan.flags_reduced = True
            if complete:
                self._updater.push(complete)
            if self._waiters:
                self._changed.notify_all()
            if not self._outstanding:
                self._order_next(plan)

    def _order_next(self, plan: Plan) -> None:
        """Between two rounds the leader may change from choosing to replaying."""
        leader = self._leader
        if leader is not None and leader.replayed is not None:
            if not isinstance(self._replaying, Following):
                self._replaying = Following()
                self._scheduler.core.use_queue(self._replaying)
            self._scheduler.ordered(leader.replayed)

    _replaying: Following | None = None

    def fail(self, error: BaseException) -> None:
        """The first error is kept and raised wherever the user's thread waits. Any thread.

        It ends everything under way, so that the other ranks learn about it now.
        """
        with self._changed:
            if self.error is not None:
                return
            self.error = error
            self._changed.notify_all()
        # Without the lock: a store that does not answer may take its time.
        if not isinstance(error, PeerLost):
            self.data.leave_note(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        self.data.abort()
        self.control.abort()

    # -- step --------------------------------------------------------------------------

    def _before_step(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        self.check()
        self.meter.step_begins()
        if self._round_open and self._missing:
            self._complain_unused()
        if self.plan is None:
            return None
        if (
            not self._outstanding
            or not deferred.cross
            or self._must_step_whole(optimizer, args, kwargs)
        ):
            self.wait_reduced()
            self.settle_all()
            self._plain_grads(optimizer)
            self.meter.stepped(0)
            return None
        deferred.guard()
        eager = self._arm(deferred)
        return (deferred.copy(eager), *args[1:]), kwargs

    def _must_step_whole(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
        """Closures evaluate the model again; fused GradScaler takes its scale back after step."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        return closure is not None or hasattr(optimizer, "grad_scale")

    def _arm(self, deferred: Deferred) -> list[dict[str, Any]]:
        """Arms what is being reduced; returns groups with what must be stepped right now."""
        eager: list[dict[str, Any]] = []
        armed: dict[Bundle, list[tuple[Deferred, dict[str, Any], list[Slot]]]] = {}
        for group in deferred.optimizer.param_groups:
            taken: dict[str, Any] | None = None
            now = []
            for parameter in group["params"]:
                slot = self._by_id.get(id(parameter))
                if slot is not None and slot.used and parameter.grad is slot.lazy:
                    if taken is None:
                        taken = snapshot(group)
                    if slot.alias.data_ptr() != parameter.data_ptr():
                        slot.realias()
                        deferred.know(slot)
                    slot.used, slot.taken = False, True
                    jobs = armed.setdefault(slot.bundle, [])
                    if jobs and jobs[-1][1] is taken:
                        jobs[-1][2].append(slot)
                    else:
                        jobs.append((deferred, taken, [slot]))
                elif parameter.grad is not None:
                    if slot is not None and slot.bundle.armed:
                        self.settle(slot.bundle)
                    now.append(parameter)
            if now:
                eager.append({**group, "params": now})
        self._streams.stepped()
        for jobs in armed.values():
            for _, _, slots in jobs:
                for slot in slots:
                    hold(slot.parameter, slot.settle)
        with self._changed:
            crossing = 0
            for bundle, jobs in armed.items():
                bundle.jobs.extend(jobs)
                bundle.armed = bundle.held = True
                if bundle.sending:
                    crossing += bundle.nbytes
            self._updater.push([bundle for bundle in armed if not bundle.sending])
        self.meter.stepped(crossing)
        return eager

    def _plain_grads(self, optimizer: torch.optim.Optimizer) -> None:
        """What is reduced needs no lazy view: torch's fast paths want plain tensors."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = self._by_id.get(id(parameter))
                if slot is not None and parameter.grad is slot.lazy:
                    parameter.grad = slot.view

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.meter.step_ends()

    def _complain_unused(self) -> None:
        names = [slot.name for slot in self._slots if not slot.fired]
        text = (
            f"{len(names)} parameters got no gradient on rank {self.data.rank}: "
            f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. If that may happen, say "
            "find_unused_parameters=True to DistributedDataParallel, or to bytesched.wrap for a "
            "plain module"
        )
        self.data.leave_note(text)
        raise UnusedParameterError(text)

    # -- settling ----------------------------------------------------------------------

    def settle(self, bundle: Bundle, by: str = "") -> None:
        """Returns when the update of ``bundle`` has been applied; its parameters are free."""
        if bundle.armed:
            began_ns = perf_counter_ns()
            self._wait(lambda: not bundle.armed, f"the update of {bundle.slots[0].name}")
            self.meter.waited(by, began_ns, bundle)
        if bundle.held:
            self._streams.read()
            bundle.held = False
            for slot in bundle.slots:
                if is_held(slot.parameter):
                    release(slot.parameter)

    def settle_all(self) -> None:
        """Applies every armed update."""
        if self.plan is not None:
            for bundle in self.plan.bundles:
                if bundle.held:
                    self.settle(bundle, "flush")

    def _settle_grad(self, slot: Slot) -> None:
        bundle = slot.bundle
        if bundle.armed:
            self.settle(bundle, f"{slot.name}.grad")
        elif bundle.sending:
            began_ns = perf_counter_ns()
            self._wait(lambda: not bundle.sending, f"the gradient of {slot.name}")
            self.meter.waited(f"{slot.name}.grad", began_ns, bundle)

    def wait_reduced(self) -> None:
        """Returns when nothing is on the wire."""
        if self._outstanding:
            began_ns = perf_counter_ns()
            self._wait(lambda: not self._outstanding, "all gradients")
            self.meter.waited("step", began_ns, None)

    def flush(self) -> None:
        """Everything that was started is reduced, and everything armed is applied."""
        self.check()
        if self.plan is not None and not (self._round_open and self._missing):
            self.wait_reduced()
            self.settle_all()

    def check(self) -> None:
        """Raises the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = monotonic() + self.config.timeout_s
        with self._changed:
            self._waiters += 1
            try:
                while not done() and self.error is None and monotonic() < deadline:
                    self._changed.wait(deadline - monotonic())
                finished = done()
            finally:
                self._waiters -= 1
        if not finished:
            self.check()
            self._time_out(what)

    def _time_out(self, what: str) -> None:
        error = SchedulerTimeout(
            f"waited {self.config.timeout_s:g} s for {what}: {self._scheduler!r}{self.data.note()}",
            rank=self.data.rank,
            story=self._scheduler.core.story().splitlines(),
        )
        self.fail(error)
        raise error

    def _updated(self, bundles: Iterable[Bundle]) -> None:
        """Called by the updater under the lock."""
        for bundle in bundles:
            bundle.jobs.clear()
            bundle.armed = False
        if self._waiters:
            self._changed.notify_all()

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """Takes every hook off and stops every thread; does not flush. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._first_use.close()
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception:
                log.exception("a hook could not be taken off")
        if self.plan is not None:
            self._updater.close()
            self._scheduler.close()
            if self._follower is not None:
                self._follower.close()
            for slot in self._slots:
                if is_held(slot.parameter):
                    release(slot.parameter)
                if slot.parameter.grad is slot.lazy:
                    slot.parameter.grad = slot.view
        self.observers.close()

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the warm-up; see the README for their meaning."""
        replays = (self._leader or self._follower) is not None and (
            (self._leader or self._follower).replayed is not None  # type: ignore[union-attr]
        )
        scheduler = self._scheduler if self.plan is not None else None
        return {
            **self.meter.figures(scheduler),
            "mode": self._mode(),
            "order": "replay" if replays else "leader",
            "rank": self.data.rank,
            "world_size": self.data.size,
        }

    def _mode(self) -> str:
        return "cross" if any(d.cross for d in self._deferred.values()) else "backward"

    def __repr__(self) -> str:
        if self.error is not None:
            state = f"failed: {self.error}"
        elif self.plan is None:
            state = "warming up"
        else:
            held = sum(bundle.held for bundle in self.plan.bundles)
            state = f"{self._outstanding} chunks outstanding, {held} bundles held, {self.plan!r}"
        return f"<bytesched rank {self.data.rank} of {self.data.size}: {state}>"
