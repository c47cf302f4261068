"""Every wait of a script's first steps: which line of it waits, and for what."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from weakref import ref

import torch.distributed as dist

from bytesched.link.host import no_gain
from bytesched.observe import Observer

from .. import explain_optimizer
from ..figures.causes import place
from ..planned.session import PlannedSession
from ..registry import after_wrap, optimizers_of

_MS: Final = 1e6

#: for the other ranks to come to the last step
_PATIENCE: Final = timedelta(seconds=60)


@dataclass
class Wait:
    """What one line of the script waited for."""

    #: the function of torch that it calls, or nothing
    function: str
    #: the line
    line: str
    #: "norms", "gradients", "weights" of modules in a forward pass, "parameters" outside of it,
    #: the "step" that updates everything at once, a "backward" pass that begins while something is
    #: still being sent, or "updates" of all
    kind: str
    #: how long for each gradient, module or parameter, in ms
    of_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def ms(self) -> float:
        """How long in all."""
        return sum(self.of_ms.values())


class Explained(Observer):
    """Writes down waits, and ends the script after so many steps of a model."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._parameters: set[str] = set()
        self._waits: dict[tuple[str, str, str], Wait] = {}
        self._sessions: list[ref[PlannedSession]] = []
        #: of each optimizer that steps whole, why; and of models on a GPU where nothing is gained
        self.verdicts: list[str] = []

    def watch(self, session: PlannedSession) -> None:
        """From now on waits of ``session`` are written down."""
        root = session.root
        names = [] if root is None else [name for name, _ in root.named_parameters()]
        self._parameters.update(names, (name.removeprefix("module.") for name in names))
        self._sessions.append(ref(session))
        session.observers.add(self)
        if session.stats()["mode"] != "cross":
            self.verdicts += map(explain_optimizer, optimizers_of(session))

    def waits(self) -> list[Wait]:
        """The longest first."""
        return sorted(self._waits.values(), key=lambda wait: -wait.ms)

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        if track != "wait" or not self._are_measuring:
            return
        function, line = place()
        key = function, line, self._kind(name)
        wait = self._waits.setdefault(key, Wait(*key))
        wait.of_ms[name.removesuffix(".grad")] += (end_ns - start_ns) / _MS

    def on_step(self, step: int, at_ns: int) -> None:
        # Every rank comes to this step, and ends as a script does that has come to its end.
        if step >= self._steps:
            self.verdicts += filter(None, map(_of_host, self._alive()))
            if dist.is_available() and dist.is_initialized():
                # A rank that goes while others still answer it would look lost to them.
                with contextlib.suppress(RuntimeError):
                    dist.barrier(async_op=True).wait(_PATIENCE)
            raise SystemExit(0)

    @property
    def _are_measuring(self) -> bool:
        """Whether the first rounds of every model, which no others are like, are over."""
        return all(session.is_measuring for session in self._alive())

    def _alive(self) -> list[PlannedSession]:
        return [session for r in self._sessions if (session := r()) is not None]

    def _kind(self, name: str) -> str:
        kinds = {
            "norm of all gradients": "norms",
            "step": "step",
            "backward": "backward",
            "flush": "updates",
        }
        if name in kinds:
            return kinds[name]
        if name.endswith(".grad"):
            return "gradients"
        return "parameters" if name in self._parameters else "weights"


def _of_host(session: PlannedSession) -> str:
    """Why nothing is gained on a GPU that waits for its host, if so."""
    figures = session.stats()
    # What a plan can hide is a part of what is sent, where that was seen.
    if session.slots[0].parameter.device.type == "cpu" or not figures["comm_ms"]:
        return ""
    return no_gain(len(session.slots), int(figures["chunks"]), float(figures["comm_ms"]) / 1e3)


def begin(steps: int) -> Explained:
    """What is wrapped from now on is explained, and ends after so many steps."""
    explained = Explained(steps)
    after_wrap.append(explained.watch)
    return explained
