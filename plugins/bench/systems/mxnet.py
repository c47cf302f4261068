"""One worker of `scripts/measure-mxnet`: a Gluon trainer on a model whose compute is emulated.

The engine runs the layers as it would run those of an accelerator: an operation begins when its
arrays are free, takes its time, and leaves the host alone meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mxnet as mx

import bytesched
from bytesched.bench.profile import LayerProfile, Profile, parse_profile
from bytesched.bench.specification import MXNetSpecification
from bytesched.records import from_json

from ...stores.mxnet.engine import Held, post

__all__ = ["Device", "EmulatedModel"]

_LEARNING_RATE = 0.01
#: An operation that begins so soon after its predecessor's end was only waiting for that.
_BEHIND_S = 0.002


class Device:
    """Runs one operation at a time, for a given time."""

    def __init__(self) -> None:
        self._begun: SimpleQueue[tuple[Held, float, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def run(self, duration_s: float, *, reads: list[Any], writes: list[Any]) -> None:
        """Gives the engine an operation of that duration."""
        post(
            lambda held: self._begun.put((held, time.perf_counter(), duration_s)),
            reads=reads,
            writes=writes,
        )

    def close(self) -> None:
        """Ends when what was begun has ended."""
        self._begun.put(None)
        self._thread.join()

    def _run(self) -> None:
        due_s = 0.0
        while (begun := self._begun.get()) is not None:
            held, began_s, duration_s = begun
            # Sleeps end late; an accelerator would have begun at once.
            due_s = (due_s if began_s - due_s < _BEHIND_S else began_s) + duration_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
            held.release()


class EmulatedModel:
    """The layers of a profile: parameters of Gluon, with gradients of ones."""

    def __init__(self, profile: Profile, device: Device) -> None:
        self._device = device
        self._layers: list[tuple[LayerProfile, list[Any], Any]] = []
        self.parameters: list[Any] = []
        for number, layer in enumerate(profile.layers):
            parameters = [
                mx.gluon.Parameter(f"layer{number:03}_{index}", shape=shape)
                for index, shape in enumerate(layer.shapes)
            ]
            for parameter in parameters:
                parameter.initialize(mx.init.Uniform(0.1), mx.cpu())
                parameter.grad()[:] = 1
            self._layers.append((layer, parameters, mx.nd.zeros(1)))
            self.parameters += parameters

    def forward(self) -> Any:
        """The output, when it is computed."""
        before: list[Any] = []
        for layer, parameters, output in self._layers:
            weights = [parameter.data() for parameter in parameters]
            self._device.run(layer.forward_ms / 1e3, reads=[*before, *weights], writes=[output])
            before = [output]
        return before[0]

    def backward(self) -> None:
        """Last layer first; an output stands for its gradient as well."""
        after: list[Any] = []
        for layer, parameters, output in reversed(self._layers):
            weights = [parameter.data() for parameter in parameters]
            gradients = [parameter.grad() for parameter in parameters]
            writes = [*gradients, output]
            self._device.run(layer.backward_ms / 1e3, reads=[*after, *weights], writes=writes)
            after = [output]
            for weight in weights:
                # What autograd would set, and the trainer asks for.
                weight._fresh_grad = True

    def digest(self) -> str:
        """Of all weights."""
        found = hashlib.sha256()
        for parameter in self.parameters:
            found.update(parameter.data().asnumpy().tobytes())
        return found.hexdigest()[:16]


def train(request: MXNetSpecification) -> dict[str, Any]:
    """Seconds of each iteration, from forward to forward, and the weights at the end."""
    device = Device()
    model = EmulatedModel(parse_profile(request.profile, "request"), device)
    # A list keeps the order of the layers, which a dict of parameters loses to their names.
    trainer = mx.gluon.Trainer(
        model.parameters,
        "sgd",
        {"learning_rate": _LEARNING_RATE},
        kvstore="dist_sync",
        update_on_kvstore=request.updates,
    )
    if request.options is not None:
        bytesched.wrap(trainer, **request.options)  # type: ignore[call-overload]
    ends_s = []
    for _ in range(request.warmup + request.iterations + 1):
        model.forward().wait_to_read()
        ends_s.append(time.perf_counter())
        model.backward()
        trainer.step(1)
    mx.nd.waitall()
    device.close()
    timed = ends_s[request.warmup :]
    found = {
        "iterations_s": [after - before for before, after in pairwise(timed)],
        "weights": model.digest(),
        "rank": trainer._kvstore.rank,
    }
    if hasattr(trainer._kvstore, "stats"):
        found["stats"] = trainer._kvstore.stats()
    return found


def main() -> None:
    """Answers the request of the command line in its file."""
    request = from_json(MXNetSpecification, sys.argv[1])
    found = train(request)
    Path(request.answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
