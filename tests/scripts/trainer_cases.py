"""Each trainer, plainly and then scheduled, in several of its ways.

Rank 0 prints a line of JSON for each way: the digests of the weights, and the figures.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

SMALL: dict[str, Any] = {"partition_bytes": 1 << 18, "credit_bytes": 1 << 19}

#: name of a way, both digests, and the figures of the run that was scheduled
Outcome = tuple[str, str, str, dict[str, Any]]


def _seeded(kind: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return kind()


def lightning() -> Iterator[Outcome]:
    import trainer_lightning as example
    from lightning.pytorch import LightningModule

    from bytesched.integrations.lightning import SchedulingCallback

    class Manual(example.Classifier):
        """Steps by itself, two optimizers in turn."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> Any:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, index))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            return [torch.optim.SGD([first], lr=0.01), torch.optim.AdamW(others, lr=1e-3)]

    ways: dict[str, tuple[type[LightningModule], dict[str, Any], dict[str, Any]]] = {
        "automatic": (example.Classifier, {}, {}),
        "manual": (Manual, {}, {}),
        "accumulating": (example.Classifier, {"accumulate_grad_batches": 2}, {}),
        "clipping": (example.Classifier, {"gradient_clip_val": 0.1}, {"split": "on"}),
    }
    for way, (kind, options, fields) in ways.items():
        callback = SchedulingCallback(**SMALL, **fields)
        plain, ours = (
            example.train(_seeded(kind), *callbacks, **options, limit_train_batches=6)
            for callbacks in ([], [callback])
        )
        yield way, plain, ours, callback.stats


def transformers() -> Iterator[Outcome]:
    import trainer_transformers as example

    from bytesched.integrations.transformers import SchedulingCallback

    ways: dict[str, dict[str, Any]] = {
        "by norm": {"steps": 6},
        "accumulating by norm": {"gradient_accumulation_steps": 2, "steps": 6},
        "logging norms": {"max_grad_norm": 0.0, "steps": 6},
        "Adafactor": {"optim": "adafactor", "steps": 6},
    }
    for way, options in ways.items():
        # Sizes are chosen: after a norm, small chunks are all there when step() is called.
        callback = SchedulingCallback(split="on")
        plain, ours = (example.train(*callbacks, **options) for callbacks in ([], [callback]))
        yield way, plain, ours, callback.stats


def accelerate() -> Iterator[Outcome]:
    import trainer_accelerate as example
    from accelerate import Accelerator

    ways: dict[str, tuple[int, float, dict[str, Any]]] = {
        "by default": (1, 0.0, {}),
        "accumulating": (2, 0.0, {}),
        "clipping": (1, 0.1, {"split": "on"}),
    }
    for way, (steps, clip, fields) in ways.items():
        outcomes = [
            example.train(
                Accelerator(cpu=True, gradient_accumulation_steps=steps),
                schedule=schedule,
                clip=clip,
                **(SMALL | fields if schedule else {}),
            )
            for schedule in (False, True)
        ]
        (plain, _), (ours, figures) = outcomes
        yield way, plain, ours, figures


def fabric() -> Iterator[Outcome]:
    import trainer_fabric as example
    from lightning.fabric import Fabric

    launched = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    launched.launch()
    ways: dict[str, tuple[float, dict[str, Any]]] = {
        "by default": (0.0, {}),
        "clipping": (0.1, {"split": "on"}),
    }
    for way, (clip, fields) in ways.items():
        plain, _ = example.train(launched, clip=clip, enabled=False)
        ours, figures = example.train(launched, clip=clip, **SMALL, **fields)
        yield way, plain, ours, figures


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for trainer in (accelerate, transformers, lightning, fabric):
        for way, plain, ours, figures in trainer():
            outcome = {"way": way, "plain": plain, "ours": ours, "figures": figures}
            if os.environ["RANK"] == "0":
                print(json.dumps({"trainer": trainer.__name__, **outcome}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
