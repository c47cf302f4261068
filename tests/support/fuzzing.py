"""A fuzzer of the guard: reads and writes of weights and gradients that are outstanding.

`python fuzzing.py --minutes N [--seed S]` prints the seed of each sequence that differs from plain
training, and where all threads are when one does not end. What is read and written is a catalogue
of torch's public functions, made by trying them: one that returns the same twice for a plain
tensor must return that for a pending one.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from drawn_optimizers import UNKNOWN, Own, made, stepped
from fake_wire import FakeWire, inputs
from fake_wire import Run as Training
from torch import Tensor
from training import differences, frozen

from bytesched.plugins.proxies.entries import guard_entries

STEPS = 5
#: more chunks than a round has: so many at most have not come when something is used
LATE_CHUNKS = 12
#: a sequence takes a fraction of a second: one that takes longer than this hangs
HANGS_S = 300.0
#: names of optimizers of torch's
KNOWN = ("adam_foreach", "adamw", "rmsprop", "sgd_momentum")
#: of sequences, whose optimizer is of a class that torch does not have
UNKNOWN_SHARE = 0.3
#: random numbers, addresses, other devices, and what concerns no values
_LEFT_OUT = """
    rand bernoulli dropout multinomial poisson normal cauchy exponential geometric uniform
    empty new_empty data_ptr storage share pin_memory cuda cpu xpu ipu hpu mtia backward hook
    requires_grad retain_grad resize set_ apply_ map_ names rename align refine_names nested
    module_load to_mkldnn compile save load seed thread fork print wait vmap cond while_loop
    is_shared is_inference is_pinned get_device _version sparse quantize fake alpha_dropout
    gumbel rrelu deterministic default_ autocast profiler tensor as_subclass has_torch_function
"""
#: what depends on where memory lies, or on what was in it before; and eigenvalues, of which LAPACK
#: dies where there is a NaN (xGEBAL), in plain training, too
_UNSTEADY = "lstsq fbgemm eig"
#: takes as many steps as its values say: minutes where weights have grown, in plain training, too
_ENDLESS = "laguerre_polynomial"


@dataclass(frozen=True)
class Use:
    """A public function, and what it is given beside the tensor."""

    name: str
    call: Callable[[Tensor], Any]


def templates(function: Callable[..., Any]) -> Iterator[Callable[[Tensor], Any]]:
    """Ways to call ``function`` with a tensor; the first that works is taken."""
    yield lambda t: function(t)
    yield lambda t: function(t, t)
    yield lambda t: function(t, 2)
    yield lambda t: function(t, 0.5)
    yield lambda t: function(t, 0, 1)
    yield lambda t: function([t, t])
    yield lambda t: function(t.shape[0], t)
    yield lambda t: function(t, torch.ones(t.shape), 0.5)


def templates_behind(function: Callable[..., Any]) -> Iterator[Callable[[Tensor], Any]]:
    """Ways to call ``function`` with a plain tensor, too, which comes first."""
    yield lambda t: function(torch.ones(t.shape), t)
    yield lambda t: function([torch.ones(t.shape), t])
    yield lambda t: function(torch.ones(t.shape), t, t)


@cache
def catalogue() -> tuple[list[Use], list[Use]]:
    """What reads, and what writes in place and leaves shape, strides and dtype."""
    # Functions that were taken before the first wrap() do not wait: a limit that is documented.
    guard_entries()
    reads: list[Use] = []
    writes: list[Use] = []
    places = [
        (torch.Tensor, "Tensor"),
        (torch, "torch"),
        (torch.linalg, "linalg"),
        (torch.special, "special"),
        (torch.fft, "fft"),
        (torch.nn.functional, "functional"),
    ]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for place, prefix in places:
            for name in sorted(dir(place)):
                function = getattr(place, name, None)
                if name.startswith("_") or not callable(function) or isinstance(function, type):
                    continue
                if any(word in name for word in f"{_LEFT_OUT} {_UNSTEADY} {_ENDLESS}".split()):
                    continue
                use = _tried(f"{prefix}.{name}", templates(function))
                if use is not None:
                    (writes if name.endswith("_") else reads).append(use)
                behind = _tried(f"{prefix}.{name}, behind another", templates_behind(function))
                if behind is not None:
                    reads.append(behind)
    return reads, writes


def _tried(name: str, calls: Iterator[Callable[[Tensor], Any]]) -> Use | None:
    for call in calls:
        samples = [torch.linspace(-1.0, 2.0, 16).view(4, 4) for _ in range(2)]
        try:
            once, twice = (seen(call(sample)) for sample in samples)
            same = next(differences(once, twice, name), None) is None
        except Exception:  # noqa: BLE001 - not a way to call it
            continue
        kept = all(t.shape == (4, 4) and t.stride() == (4, 1) for t in samples)
        changed = not torch.equal(samples[0], torch.linspace(-1.0, 2.0, 16).view(4, 4))
        if not (kept and same):
            return None
        if once in (None, [], {}) and not changed:
            return None
        return Use(name, call)
    return None


def seen(value: Any) -> Any:
    """What can be compared of it."""
    if isinstance(value, Tensor):
        return frozen(value.to_dense() if value.layout is not torch.strided else value)
    if isinstance(value, (list, tuple)):
        return [seen(item) for item in value]
    return value if isinstance(value, (int, float, str, bool)) else None


@dataclass
class Run:
    """One training, with a session or without; both make the same choices for one seed.

    A read that does not wait for what is under way sees old values.
    """

    seed: int
    is_ours: bool
    #: name of an optimizer in `drawn_optimizers`; empty: one of torch's
    unknown: str = ""
    records: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._choose, self._comes = random.Random(self.seed), random.Random(self.seed)
        wire = FakeWire(size=1) if self.is_ours else None
        self.training = Training(wire, is_plain=True, optimizer_of=self._made)
        self._model, self._optimizer = self.training.model, self.training.optimizer
        self._kept: list[tuple[str, Any]] = []

    def _made(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        random.seed(3)
        np.random.seed(3)
        weights: list[Any] = [*parameters]
        return made(self.unknown or self._choose.choice(KNOWN), weights)

    def train(self) -> None:
        for step in range(STEPS):
            self._one_step(step)
        self.records.append(("weights", seen(list(self._model.parameters()))))
        self.records += [(f"kept {name}", seen(value)) for name, value in self._kept]

    def _one_step(self, step: int) -> None:
        zeroed = self._choose.choice(["none", "zero", "model", "never"])
        if zeroed == "model":
            self._model.zero_grad()
        elif zeroed != "never":
            self._optimizer.zero_grad(set_to_none=zeroed == "none")
        self._model(inputs(step)).square().mean().backward()
        self._use([p.grad for p in self._model.parameters()], "grad")
        if self.unknown:
            self._step_as_drawn(step)
        else:
            self._optimizer.step()
        self._use(list(self._model.parameters()), "weight")

    def _step_as_drawn(self, step: int) -> None:
        def closure() -> Tensor:
            with torch.enable_grad():
                self._optimizer.zero_grad()
                loss: Tensor = self._model(inputs(step)).square().mean()
                loss.backward()
            return loss

        returned = stepped(self._optimizer, closure, self._choose)
        self.records.append(("returned", seen(returned)))
        if isinstance(self._optimizer, Own) and self._choose.random() < 0.6:
            self._optimizer.meddle(self._choose)

    def _use(self, tensors: list[Tensor], what: str) -> None:
        reads, writes = catalogue()
        for _ in range(self._choose.randrange(4)):
            self.training.let(but=self._comes.randrange(LATE_CHUNKS))
            tensor = self._choose.choice(tensors)
            if self._choose.random() < 0.2:
                use = self._choose.choice(writes)
            else:
                use = self._choose.choice(reads)
            keeps = self._choose.random() < 0.2
            name = f"{what} {use.name}"
            try:
                with warnings.catch_warnings(), torch.no_grad():
                    warnings.simplefilter("ignore")
                    value = use.call(tensor)
                    self.records.append((name, seen(value)))
                if keeps and what == "grad":
                    self._kept.append((name, value))
            except Exception as error:  # noqa: BLE001 - as the plain run does
                self.records.append((name, type(error).__name__))


def fuzzed(seed: int, unknown_share: float = UNKNOWN_SHARE) -> list[str]:
    """Where a scheduled run of the sequence ``seed`` differs from the plain one."""
    choose = random.Random(f"optimizer of {seed}")
    unknown = choose.choice(sorted(UNKNOWN)) if choose.random() < unknown_share else ""
    plain = Run(seed, False, unknown)
    plain.train()
    ours = Run(seed, True, unknown)
    try:
        ours.train()
    finally:
        ours.training.close()
    found: list[str] = []
    for index, ((name, expected), (_, got)) in enumerate(
        zip(plain.records, ours.records, strict=True)
    ):
        found += differences(expected, got, f"record {index} {name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    reads, writes = catalogue()
    print(f"{len(reads)} reads, {len(writes)} writes; first seed {options.seed}", flush=True)
    ends = time.monotonic() + 60 * options.minutes
    count = failures = 0
    while time.monotonic() < ends:
        seed = options.seed + count
        count += 1
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            found = fuzzed(seed)
        except Exception as error:  # noqa: BLE001 - reported with its seed
            found = [f"{type(error).__name__}: {error}"]
        if found:
            failures += 1
            print(f"seed {seed}:", *found[:4], sep="\n  ", flush=True)
    print(f"{count} sequences, {failures} differ", flush=True)
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
