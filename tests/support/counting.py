"""What a gradient costs in Python calls, on two ranks over loopback: see scripts/count-calls.

Calls, and not seconds: they are the same on every machine. A layer of the emulated model sleeps
where a real one computes, so what is counted is the way of its gradients alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from rank_worker import signals
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.bench.provenance import provenance
from bytesched.files import write_text
from bytesched.plugins.routes.group import Group

#: the same on every machine, as chosen sizes are not
SIZES: dict[str, Any] = {"partition_bytes": 1 << 17, "credit_bytes": 1 << 19}
#: unless it is said
LAYERS = 36
TENSORS_PER_LAYER = 4
#: iterations before any is counted: the last ones that learn something are among them
SETTLING = 12
#: iterations that are counted together, and how often: where ranks wait for each other, a busy
#: machine adds calls to some
TOGETHER, TIMES = 4, 4
FORWARD_S, BACKWARD_S = 0.001, 0.002
#: what puts its argument ``tensor`` on the wire
SENDS = frozenset({Group.send.__code__, Group.all_reduce.__code__})


@dataclass(frozen=True)
class Way:
    #: what `wrap` is told; None: plain DDP
    fields: Mapping[str, Any] | None = None
    clips: bool = False
    #: whether half of the gradients of the other rank come when `step()` has returned
    is_late: bool = False
    #: plain DDP that trains the same
    plain: str = "ddp"


WAYS = {
    "ddp": Way(),
    "whole": Way({}),
    "crossing": Way({}, is_late=True),
    "ddp-clipped": Way(clips=True),
    "clipped": Way({"split": "on"}, clips=True, plain="ddp-clipped"),
    "clipped-whole": Way({"split": "off"}, clips=True, plain="ddp-clipped"),
    "sharded": Way({"shard": True}),
}


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[], object], *parameters: Tensor) -> Tensor:
        ctx.shapes, ctx.compute = [parameter.shape for parameter in parameters], compute
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.compute()
        return (grads[0], None, *map(torch.ones, ctx.shapes))


class Layer(nn.Module):
    """One large parameter and three small ones, as many layers have."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.bias, self.scale, self.shift = (nn.Parameter(torch.zeros(256)) for _ in range(3))
        #: in front of its gradients
        self.compute: Callable[[], object] = partial(time.sleep, BACKWARD_S)

    def forward(self, x: Tensor) -> Any:
        parameters = self.weight, self.bias, self.scale, self.shift
        return _Sleeping.apply(x, self.compute, *parameters)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Taken:
    """What was counted in a time."""

    #: by thread and function
    calls: Counter[tuple[str, str]]
    #: messages and all-reduces that were begun, and their bytes
    messages: int
    nbytes: int


class Calls:
    """Python calls of the threads that are made while it watches, and of the one it is made in."""

    def __init__(self) -> None:
        #: by thread and code
        self._counts: dict[tuple[str, CodeType], int] = {}
        #: of each message
        self._sent_bytes: list[int] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            key = threading.current_thread().name, frame.f_code
            self._counts[key] = self._counts.get(key, 0) + 1
            if frame.f_code in SENDS:
                self._sent_bytes.append(frame.f_locals["tensor"].nbytes)

    def taken(self) -> Taken:
        """What was counted since the last time."""
        counts, self._counts = self._counts, {}
        sent, self._sent_bytes = self._sent_bytes, []
        # No default of a Counter here, which would be counted as well.
        found: Counter[tuple[str, str]] = Counter()
        for (thread, code), number in counts.items():
            file = "/".join(code.co_filename.split("/")[-3:])
            key = thread, f"{file}:{code.co_firstlineno} {code.co_name}"
            found[key] = found.get(key, 0) + number
        return Taken(found, len(sent), sum(sent))


def count(way: str, layers: int) -> list[Taken]:
    """On a rank: what some iterations do, up to their last update, several times."""
    fields, calls = WAYS[way].fields, Calls()
    x, step = torch.ones(1, requires_grad=True), 0
    net = nn.Sequential(*(Layer(2_000 + 900 * layer) for layer in range(layers)))

    def train(iterations: int) -> Taken:
        nonlocal step
        for _ in range(iterations):
            optimizer.zero_grad()
            model(x).sum().backward()
            if WAYS[way].clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if WAYS[way].is_late and dist.get_rank() == 0:
                signals().set(f"step {step}")
            step += 1
        bytesched.flush()
        return calls.taken()

    def wait_for_step() -> None:
        # Nothing crosses the first two.
        if step > 1:
            signals().wait(f"step {step}")

    if WAYS[way].is_late and dist.get_rank():
        half: Any = net[layers // 2]
        half.compute = wait_for_step
    with calls.watching():
        model = DistributedDataParallel(
            net, bucket_cap_mb=SIZES["partition_bytes"] / (1 << 20), gradient_as_bucket_view=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if fields is not None:
            # Plain DDP would not end backward before a rank that waits for the other's step().
            bytesched.wrap(optimizer, model, guard=False, **SIZES, **fields)
        train(SETTLING)
        found = [train(TOGETHER) for _ in range(TIMES)]
        if fields is not None:
            bytesched.unwrap(optimizer)
    return found


@dataclass(frozen=True)
class Counted:
    """What rank 0 does in an iteration."""

    #: for each tensor, by thread and function
    by_function: dict[tuple[str, str], float]
    #: messages and all-reduces, and their bytes; of plain DDP, whose own are not seen, 0
    messages: float
    nbytes: float

    @property
    def total(self) -> float:
        return sum(self.by_function.values())

    def by_thread(self) -> dict[str, float]:
        """The most first."""
        found: Counter[str] = Counter()
        for (thread, _), calls in self.by_function.items():
            found[thread] += calls  # type: ignore[assignment]
        return dict(found.most_common())

    def most(self, thread: str, number: int) -> list[tuple[str, float]]:
        """The functions of ``thread`` that are called most."""
        found = [(name, calls) for (of, name), calls in self.by_function.items() if of == thread]
        return sorted(found, key=lambda each: -each[1])[:number]


def counted(ranks: Ranks, way: str, layers: int) -> Counted:
    """What rank 0 of ``ranks`` counts where ``layers`` are trained in a ``way``, at the least."""
    found: list[Taken] = ranks.run(count, way, layers, timeout_s=100.0)[0]
    calls = min((taken.calls for taken in found), key=Counter.total)
    per_tensor = TOGETHER * TENSORS_PER_LAYER * layers
    return Counted(
        {key: number / per_tensor for key, number in calls.items()},
        min(taken.messages for taken in found) / TOGETHER,
        min(taken.nbytes for taken in found) / TOGETHER,
    )


def figures(found: Mapping[str, Counted]) -> dict[str, Any]:
    """By way, as `bytesched bench --compare` reads it."""
    systems = {}
    for way, its in found.items():
        counts = {"calls_per_tensor": round(its.total, 1)}
        if WAYS[way].fields is not None:
            counts |= {"messages": its.messages, "bytes": its.nbytes}
        systems[way] = {"counts": counts}
    return systems


def setting(layers: int) -> dict[str, Any]:
    """What two files must have in common to be compared."""
    return {"layers": layers, "tensors_per_layer": TENSORS_PER_LAYER, **SIZES}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="count-calls", description=__doc__)
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--layers", type=int, default=LAYERS, help="of four tensors each")
    parser.add_argument("--functions", type=int, default=0, help="to show of each thread")
    parser.add_argument("--json", type=Path, help="for bytesched bench --compare")
    options = parser.parse_args(argv)
    ranks = Ranks(2)
    print(f"{TENSORS_PER_LAYER * options.layers} tensors; calls for each of them and iteration")
    found = {}
    for way in options.ways:
        found[way] = its = counted(ranks, way, options.layers)
        print(
            f"{way:12} {its.total:6.1f}   {its.messages:g} messages, {its.nbytes:g} bytes",
            flush=True,
        )
        for thread, calls in its.by_thread().items():
            print(f"    {thread:28} {calls:6.1f}")
            for function, part in its.most(thread, options.functions):
                print(f"        {part:6.2f}  {function}")
    ranks.close()
    if options.json:
        origin = provenance(shlex.join(["scripts/count-calls", *argv]))
        result = {**origin, "setting": setting(options.layers), "systems": figures(found)}
        write_text(options.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
