"""What comes after what in a session: over a wire that sums late, and streams that only order.

Every script has the numbers of a plain run, and no operation reads or writes what nothing has
ordered before it. Each wait, taken out, is found by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from access_order import Order
from fake_cuda import CUDA, FakeStream
from fake_wire import FakeWire, Run, inputs, mlp
from torch import Tensor, nn

from bytesched.plugins.planned import gates, source, updates
from bytesched.plugins.planned.buckets import Bucket, Chunk, Member
from bytesched.plugins.planned.coding import Coding
from bytesched.plugins.planned.ddp_session import DdpSession
from bytesched.plugins.planned.rounds import Rounds
from bytesched.plugins.planned.sending import Sending, Streams
from bytesched.plugins.planned.session import PlannedSession
from bytesched.plugins.planned.updates import Updates
from bytesched.plugins.proxies.pending_grads import PendingGrad, make_plain

Script = Callable[[Run], object]


pytestmark = pytest.mark.usefixtures("group", "device")


# -- scripts ---------------------------------------------------------------------------


def usual(run: Run) -> None:
    run.train(4)


def zeroed(run: Run) -> None:
    run.train(4, set_to_none=False)


def zeroed_without_a_step(run: Run) -> None:
    run.train(2, set_to_none=False)
    run.backward()
    run.optimizer.zero_grad(set_to_none=False)
    run.train(set_to_none=False)


def gradients(run: Run) -> Iterator[Tensor]:
    return (grad for p in run.model.parameters() if (grad := p.grad) is not None)


def read_before_the_step(run: Run) -> None:
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward()
        run.see(*list(gradients(run))[:2])
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def read_after_the_step(run: Run) -> None:
    for _ in range(4):
        run.train()
        run.see(run.model.module[2].weight, *gradients(run))


def written_again_without_a_step(run: Run) -> None:
    run.train(2)
    for _ in range(3):
        run.optimizer.zero_grad()
        run.backward()
    run.optimizer.step()


def accumulated(run: Run) -> None:
    run.train(2)
    for _ in range(2):
        run.optimizer.zero_grad()
        with run.model.no_sync():
            run.backward()
        run.backward()
        run.backward()
        run.optimizer.step()


def a_regulariser_between(run: Run) -> None:
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward()
        sum(p.square().sum() for p in run.model.parameters()).backward()
        run.optimizer.step()


def the_module_beside(run: Run) -> None:
    """Of the same weights, outside of DDP: a forward pass, and a backward pass through it."""
    for step in range(4):
        run.train()
        # A graph that is kept has views of the weights.
        run.see(run.model.module(inputs(step)))
        run.optimizer.zero_grad()
        run.backward()
        run.model.module[3](torch.ones(4, 16)).sum().backward()
        run.optimizer.step()


def weights_by_hand(run: Run) -> None:
    for _ in range(4):
        run.train()
        run.see(run.model.module[0].weight.norm(), nn.functional.tanh(run.model.module[3].bias))


def kept(run: Run) -> None:
    """Gradients of three rounds, read when all of them are over."""
    lists = []
    for _ in range(5):
        run.train()
        lists.append(list(gradients(run)))
    for grads in lists:
        run.see(*grads)


def aliased(run: Run) -> None:
    """The script has tensors over the memory of gradients, which wait for nothing."""
    run.train(2, set_to_none=False)
    flat = [grad.view(-1) for grad in gradients(run)]
    for _ in range(2):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward()
        run.see(*flat)
        run.optimizer.step()


def some_have_come(run: Run) -> None:
    """When the first layer is called, all but its own sums are here."""
    for _ in range(4):
        run.train()
        run.let(but=2)


def changed_beside_one_that_is_read(run: Run) -> None:
    """In one bucket, and not in one bundle."""
    for _ in range(4):
        run.train()
        run.see(run.model.module[3].bias.grad)
        run.model.module[2].bias.grad.mul_(0.5)


def stepped_twice(run: Run) -> None:
    run.train(3)
    run.optimizer.step()
    run.train()
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
    run.optimizer.step()


def read_elsewhere(run: Run) -> None:
    """Gradients are read on a stream that comes after the one of training, and the other way."""
    here, there = CUDA.current(), FakeStream()
    run.train(2)
    for _ in range(4):
        run.train()
        there.wait_stream(here)
        run.model(inputs(0))
        with CUDA.on(there):
            run.see(*gradients(run))
        here.wait_stream(there)


def used_first_elsewhere(run: Run) -> None:
    """Rounds on one stream, and on another one what is in order after each step."""
    here, there = CUDA.current(), FakeStream()
    run.train(2)
    for _ in range(3):
        there.wait_stream(here)
        with CUDA.on(there):
            run.train()
        here.wait_stream(there)
        with CUDA.on(there):
            run.model.module(inputs(0))
        run.see(*run.model.parameters())


SCRIPTS: tuple[Script, ...] = (
    *(usual, zeroed, zeroed_without_a_step, read_before_the_step, read_after_the_step),
    *(written_again_without_a_step, accumulated, a_regulariser_between, the_module_beside),
    *(weights_by_hand, kept, aliased, some_have_come, changed_beside_one_that_is_read),
    stepped_twice,
)
#: `no_sync()`; and a part of the model by itself, which is a round without some gradients elsewhere
OF_DDP: tuple[Script, ...] = (accumulated, the_module_beside)
#: they need streams
ELSEWHERE: tuple[Script, ...] = (read_elsewhere, used_first_elsewhere)


# -- runs ------------------------------------------------------------------------------


@dataclass
class Case:
    """A script, and what it is run with."""

    script: Script
    #: ``gradient_as_bucket_view``
    view: bool = False
    #: of the chunks, once there are two rounds; None: as they become ready
    plan: Callable[[int], list[int]] | None = None
    #: where a wait is only queued
    has_streams: bool = False
    make: Callable[[], nn.Module] = mlp
    #: plain DDP has its own hook for it
    compression: str = "none"
    #: a plain module, and no DDP
    is_plain: bool = False

    def run(self) -> list[str]:
        """What is wrong with it, in words."""
        order = Order()
        both: dict[str, Any] = {
            "ddp": {"gradient_as_bucket_view": self.view},
            **{name: getattr(self, name) for name in ("make", "compression", "is_plain")},
        }
        run = Run(FakeWire(self.has_streams, order=order), order, **both)
        if self.plan is not None:
            run.plan_when_settled(self.plan)
        plain = Run(**both)
        try:
            with order.watching():
                self.script(run)
            self.script(plain)
            found = run.differences(plain)
        except Exception as error:  # noqa: BLE001 - which one is what is asked
            found = [f"{type(error).__name__}: {error}"]
        finally:
            self.crossed = run.crossed
            run.close()
        return [*order.found, *found]


def back(count: int) -> list[int]:
    """All of them wait for the last hook."""
    return list(range(count))[::-1]


def by_turns(count: int) -> list[int]:
    """Each second one is issued in the hook of a later bucket."""
    return [*range(1, count, 2), *range(0, count, 2)]


PLANS = {"as ready": None, "back": back, "by turns": by_turns}
#: they read all gradients in front of ``step()``
READING = {read_before_the_step, a_regulariser_between, aliased}


@pytest.mark.parametrize("plan", ["as ready", "by turns"])
@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.one_in(3)
def test_a_script_has_the_numbers_of_a_plain_run_and_an_order(
    script: Script, view: bool, plan: str
) -> None:
    case = Case(script, view, PLANS[plan])
    assert case.run() == []
    assert bool(case.crossed) == (script not in READING)


@pytest.mark.parametrize(
    "script",
    [script for script in (*SCRIPTS, *ELSEWHERE) if script not in OF_DDP],
    ids=lambda script: script.__name__,
)
@pytest.mark.one_in(3)
def test_so_has_one_of_a_plain_module(script: Script) -> None:
    for has_streams in (True,) if script in ELSEWHERE else (False, True):
        assert Case(script, False, by_turns, has_streams, is_plain=True).run() == []


@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
@pytest.mark.parametrize("script", [*SCRIPTS, *ELSEWHERE], ids=lambda script: script.__name__)
@pytest.mark.one_in(4)
def test_compressed_it_has_those_of_a_hook_of_ddp(script: Script, view: bool) -> None:
    for has_streams in (True,) if script in ELSEWHERE else (False, True):
        case = Case(script, view, by_turns, has_streams, compression="bf16")
        assert case.run() == []


# -- waits that are taken out ----------------------------------------------------------


class Kernel(nn.Linear):
    """A layer that is computed where no tensor is asked for its class."""

    def forward(self, input: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.functional.linear(input, self.weight, self.bias)


def kernels() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(Kernel(8, 16), nn.Tanh(), Kernel(16, 4))


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def made_plain(member: Member) -> bool:
    grad = None if member.pending is None else member.pending()
    if type(grad) is PendingGrad:
        make_plain(grad)
    return True


def not_landed(of_session: Any) -> None:
    of_session.source.backward_begins([slot.parameter for slot in of_session.slots])


def without_its_sum(bucket: Bucket) -> None:
    bucket.is_under_way = False
    for member in bucket.members:
        made_plain(member)
        member.pending = None


def still_landed(sending: Sending, chunks: Sequence[Chunk], *, is_last: bool) -> None:
    landed_on = [chunk.landed_on for chunk in chunks]
    READY(sending, chunks, is_last=is_last)
    for chunk, stream in zip(chunks, landed_on, strict=True):
        chunk.landed_on = stream


READY = Sending.ready


def without(
    owner: Any,
    name: str,
    found: str,
    script: Script = usual,
    instead: Any = nothing,
    **options: Any,
) -> tuple[Any, str, str, Case, Any]:
    """What is taken out of ``owner``, what is found then, and in which case."""
    return owner, name, found, Case(script, **options), instead


UNSUMMED = r"reads .*0\.weight\.grad, which is not summed"
OWED = r"reads .*0\.weight, which waits for its update"
IN_BUCKET = r".*0\.weight in its bucket.*"
READS, WRITES = (f"{verb} {IN_BUCKET}, and waits for no end of sum" for verb in ("reads", "writes"))
DIFFERS = r"0\.weight differs"
ADDS = r"add_? on .* (reads|writes) .*0\.weight\.grad"
WAITS = {
    "an update, for its sums": without(Sending, "wait", READS),
    "a later round, for all of the last one": without(
        DdpSession, "backward_begins", WRITES, written_again_without_a_step, not_landed
    ),
    "a pass through another graph": without(
        DdpSession, "backward_begins", ADDS, a_regulariser_between, not_landed
    ),
    "a pass through another graph, in the bucket": without(
        DdpSession, "backward_begins", ADDS, a_regulariser_between, not_landed, view=True
    ),
    "gradients that everyone sees": without(Member, "hand_out", UNSUMMED),
    "a read of a gradient": without(
        Member, "settle", f"clone on .* {UNSUMMED}", read_before_the_step, made_plain
    ),
    "zeroing, for an update that reads the bucket": without(
        Updates, "settle", f"writes {IN_BUCKET}, which an update is to read", zeroed, view=True
    ),
    "zeroing of what no update has taken": without(
        Member, "zeroes", f"zero_ on .* {WRITES}", zeroed_without_a_step, made_plain, view=True
    ),
    "the first rounds, in backward": without(Rounds, "land", UNSUMMED),
    "a use of a parameter": without(updates, "hold_all", OWED, weights_by_hand),
    "a call of a module": without(gates, "gate", OWED, instead=lambda *_: nothing, make=kernels),
    "kept gradients, for their sums": without(
        Bucket, "hand_back", "reads something, which is not summed", kept, without_its_sum
    ),
    "gradients that others see": without(source, "ALONE", UNSUMMED, aliased, 1000),
    "buckets that others see": without(Bucket, "is_seen", READS, aliased, False, view=True),
    "another stream, for an update": without(
        Streams, "part", r"reads .*0\.weight, .* of add_", used_first_elsewhere, has_streams=True
    ),
    "every round by itself": without(Sending, "ready", READS, instead=still_landed),
    "the place in the plan, for the round": without(
        Sending, "round_begins", r"'module\.\d.*' was not sent", read_before_the_step, plan=by_turns
    ),
    "compressed sums, to come back": without(Coding, "decode", DIFFERS, compression="bf16"),
    "an update, for sums of a plain module": without(Sending, "wait", READS, is_plain=True),
    "a later round of a plain module, for all of the last one": without(
        *(PlannedSession, "backward_begins", WRITES, written_again_without_a_step, not_landed),
        is_plain=True,
    ),
    "buckets that have moved": without(Bucket, "is_of", DIFFERS, instead=lambda *_: True),
}


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.one_in(2)
def test_a_wait_that_is_taken_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, expected, case, instead = WAITS[name]
    assert case.run() == []
    monkeypatch.setattr(owner, attribute, instead)
    found = case.run()
    assert any(re.search(expected, one) for one in found), found[:5]


# -- streams ---------------------------------------------------------------------------


class Branches(nn.Module):
    """Two layers beside each other, each on its stream, backward, too, as autograd has it.

    What adds to gradients runs on the stream on which DDP was made, and so do its hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16)])
        self.streams = [FakeStream(), FakeStream()]
        self._turn = ExitStack()
        for layer, stream in zip(self.layers, self.streams, strict=True):
            for parameter in layer.parameters():
                parameter.register_hook(partial(self._joins, stream))

    def forward(self, input: Tensor) -> Tensor:
        made = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(CUDA.default)
            with CUDA.on(stream):
                made.append(layer(input))
            CUDA.default.wait_stream(stream)
            made[-1].register_hook(partial(self._leaves, stream))
        return torch.tanh(made[0] + made[1])

    def _leaves(self, stream: FakeStream, grad: Tensor) -> None:
        self._turn.close()
        stream.wait_stream(CUDA.default)
        self._turn.enter_context(CUDA.on(stream))

    def _joins(self, stream: FakeStream, grad: Tensor) -> None:
        self._turn.close()
        CUDA.default.wait_stream(stream)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
@pytest.mark.parametrize(
    ("script", "make"),
    [
        *((script, mlp) for script in (usual, kept, read_elsewhere, used_first_elsewhere)),
        (usual, Branches),
    ],
    ids=["usual", "kept", "read elsewhere", "used first elsewhere", "branches"],
)
@pytest.mark.one_in(3)
def test_streams_of_the_script(script: Script, make: Any, view: bool, plan: str) -> None:
    assert Case(script, view, PLANS[plan], has_streams=True, make=make).run() == []


def in_turns(*, has_streams: bool, view: bool) -> list[str]:
    """Two models, each on its stream; what is wrong, in words."""
    order, options = Order(), {"gradient_as_bucket_view": view}
    runs = [Run(FakeWire(has_streams, order=order), order, ddp=options) for _ in range(2)]
    streams = [FakeStream() if has_streams else CUDA.default for _ in runs]
    plain = Run(ddp=options)
    plain.train(4)
    found = []
    with order.watching():
        for _ in range(4):
            for run, stream in zip(runs, streams, strict=True):
                with CUDA.on(stream):
                    run.train()
    for run, stream in zip(runs, streams, strict=True):
        with CUDA.on(stream):
            found += run.differences(plain)
        run.close()
    return [*order.found, *found]


@pytest.mark.parametrize("has_streams", [False, True])
@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
@pytest.mark.one_in(2)
def test_two_models_in_turns(has_streams: bool, view: bool) -> None:
    """The backward pass of one lands and updates what the other has left."""
    assert in_turns(has_streams=has_streams, view=view) == []


@pytest.mark.parametrize("event", ["join", "part"])
def test_an_event_between_streams_that_is_taken_out_is_found(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Streams, event, lambda streams: streams.see())
    found = in_turns(has_streams=True, view=False)
    expected = r" (reads|writes) .*weight.*, and waits for no end of \w+ on stream \d+"
    assert any(re.search(expected, one) for one in found), found[:5]
