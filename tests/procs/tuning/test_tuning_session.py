"""A session whose sizes change all the time trains as plain DDP does, to the last bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_reading as reading
from ranks import Ranks, address_of
from restless import RestlessJob, replace_tuner
from torch import nn
from training import Job, compare, sgd

import bytesched
from bytesched.tunable import Decision, RunFacts, Steps
from bytesched.tuning import file as tunefile
from bytesched.tuning.file import TuningFile
from bytesched.tuning.online import OnlineTuner, find_tuner


def check(
    ranks: Ranks, script: Callable[..., None], *args: object, rtol: float = 0, **options: object
) -> int:
    """The script's values are those of plain DDP; how many settings it was trained under."""
    outcomes = ranks.run(compare, address_of(script), args, options, rtol, RestlessJob)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    return int(outcomes[0][1]["settings"])


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_foreach", "adam_fused"])
@pytest.mark.one_in(2)
def test_optimizer(two_ranks: Ranks, name: str) -> None:
    assert check(two_ranks, optimizers.one_optimizer, name) >= 3


@pytest.mark.parametrize(
    "name", ["tied", "attention", "batch_norm", "checkpoint_reentrant", "raw_kernel"]
)
@pytest.mark.one_in(2)
def test_model(two_ranks: Ranks, name: str) -> None:
    assert check(two_ranks, models.one_model, name) >= 3


@pytest.mark.parametrize(
    "script",
    [
        optimizers.two_optimizers,
        optimizers.closure,
        optimizers.lbfgs,
        optimizers.step_every_other_backward,
        optimizers.step_skipped,
        models.view_of_buckets,
        models.static_graph,
        models.unfrozen_in_place,
        models.frozen_for_a_while,
        models.unused_and_accumulated,
        models.frozen_layer,
        models.autocast,
        gradients.no_sync,
        gradients.several_forwards_one_backward,
        gradients.clip_norm,
        gradients.gradients_kept,
        gradients.gradients_read_after_step,
        gradients.gradients_referred_to,
        gradients.two_losses,
        gradients.user_gradient_hooks,
        reading.weights_read,
        reading.averaged_model,
        reading.state_dicts,
        reading.saved,
        reading.resumed,
        reading.evaluated,
        reading.unwrapped_in_the_middle,
    ],
    ids=lambda script: script.__name__,
)
@pytest.mark.one_in(4)
def test_script(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


def test_unused_parameters(two_ranks: Ranks) -> None:
    check(two_ranks, models.unused, "differing_ranks")


@pytest.mark.parametrize("script", [optimizers.two_models, models.different_starts])
def test_plain_modules(two_ranks: Ranks, script: Callable[..., None]) -> None:
    """Without DDP there is nothing that scheduling could be left to."""
    check(two_ranks, script, module_alone=True)


@pytest.mark.parametrize("what", ["whole", "inner"])
@pytest.mark.one_in(2)
def test_compiled(two_ranks: Ranks, what: str) -> None:
    assert check(two_ranks, models.compiled, what, "aot_eager") >= 3


def test_compressed(two_ranks: Ranks) -> None:
    """Chunks have memory of their own on the wire."""
    check(two_ranks, gradients.compressed, "bf16", compression="bf16")


LAYERS = 6
WIDTH = 96


class Spy(OnlineTuner):
    """The tuner, remembering what it was told."""

    durations_s: tuple[float, ...] = ()
    busy_s = 0.0
    sent_bytes = 0

    def begin(self, facts: RunFacts) -> Decision:
        # On a busy machine the loopback is never twice the same.
        link = tuple(replace(probe, bytes_per_s=1e9) for probe in facts.probes)
        return super().begin(replace(facts, probes=link))

    def decide(self, steps: Steps) -> Decision:
        type(self).durations_s += steps.durations_s
        type(self).busy_s += steps.busy_s
        type(self).sent_bytes += steps.sent_bytes
        return super().decide(steps)


def tuned(file: str, steps: int, fields: dict[str, Any]) -> dict[str, Any]:
    """What a rank saw of a training that tunes itself."""
    job = Job(wrapped=True)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = job.ddp(module)
    optimizer = sgd(model, lr=0.01)

    def spying(config: bytesched.Config) -> Spy:
        tuner = find_tuner(config)
        assert tuner is not None
        tuner.__class__ = Spy
        assert isinstance(tuner, Spy)
        return tuner

    replace_tuner(spying)
    Spy.durations_s, Spy.busy_s, Spy.sent_bytes = (), 0.0, 0
    sizes = set()
    began_s = time.monotonic()
    # On a busy machine, loopback is another link every time.
    any_link = mock.patch.multiple(tunefile, _SAME_BANDWIDTH=math.inf, _NO_OVERHEAD_S=math.inf)
    any_link.start()
    try:
        bytesched.wrap(optimizer, model, tune=True, tune_file=file, **fields)
        for step in range(steps):
            optimizer.zero_grad()
            model(job.inputs(step, 4, WIDTH)).square().mean().backward()
            optimizer.step()
            stats = bytesched.stats(optimizer)
            # The tuner is asked when the first round is over.
            if step:
                is_off = stats["mode"] == "plain"
                sizes.add((stats["partition_bytes"], stats["credit_bytes"], is_off))
        bytesched.unwrap(optimizer)
        ended_s = time.monotonic()
    finally:
        replace_tuner(find_tuner)
        any_link.stop()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return {
        "sizes": sizes,
        "stats": stats,
        "weights": weights,
        "bytes": sum(weight.nbytes for weight in weights),
        "steps": len(Spy.durations_s),
        "step_s": sum(Spy.durations_s),
        "seconds": ended_s - began_s,
        "busy_s": Spy.busy_s,
        "sent_bytes": Spy.sent_bytes,
    }


SPACE = {"tune_space": "partition_bytes=32KiB..128KiB", "tune_steps": 64}


def test_a_training_tunes_itself_and_the_next_one_knows(two_ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    # Twice the steps and more: on a busy machine the cluster may seem to change meanwhile.
    first, other = two_ranks.run(tuned, str(file), 180, SPACE)
    assert first["sizes"] == other["sizes"], "the ranks ran with different sizes"
    assert len(first["sizes"]) > 2
    assert any(off for *_, off in first["sizes"]), "scheduling was never off"
    tuning = TuningFile.read(file)
    assert tuning.state == "done"
    assert tuning.steps <= 64
    assert tuning.fingerprint.ranks_per_host == (2,)
    assert tuning.fingerprint.model_bytes == first["bytes"]
    assert tuning.setting is not None

    known, _ = two_ranks.run(tuned, str(file), 8, SPACE)
    wanted = tuning.setting
    sizes = (wanted.partition_bytes, wanted.credit_bytes, not wanted.enabled)
    assert known["sizes"] - {(sizes[0], sizes[1], False)} <= {sizes}
    assert TuningFile.read(file).saved_at == tuning.saved_at


def test_what_is_measured_is_what_happened(two_ranks: Ranks, tmp_path: Path) -> None:
    first, _ = two_ranks.run(tuned, str(tmp_path / "x.json"), 60, SPACE)
    assert 0 < first["steps"] <= 60, "steps are told when a word is due"
    # The last step before a decision is waited for after its end.
    assert 0 < first["busy_s"] < first["seconds"]
    assert 0 < first["step_s"] < first["seconds"]
    assert 0 < first["sent_bytes"] <= first["bytes"] * first["steps"]


class Failing:
    """Gives up at the second word, or says one that nobody understands."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent

    def begin(self, facts: RunFacts) -> Decision:
        self._untuned = facts.untuned
        return Decision(facts.untuned, 2)

    def decide(self, steps: Steps) -> Decision:
        if self._silent:
            raise ArithmeticError("no idea")
        return Decision(replace(self._untuned, policy="hurry"), 2)

    def close(self) -> None:
        raise ArithmeticError("nor at the end")


def failed(silent: bool) -> Sequence[float]:
    replace_tuner(lambda config: Failing(silent=silent))
    try:
        job = Job(wrapped=True)
        model = job.ddp(nn.Linear(8, 4))
        optimizer = sgd(model)
        bytesched.wrap(optimizer, model, tune=True)
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            loss = model(job.inputs(step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        bytesched.unwrap(optimizer)
    finally:
        replace_tuner(find_tuner)
    return losses


@pytest.mark.parametrize("silent", [True, False])
def test_a_tuner_that_fails_does_not_end_the_training(two_ranks: Ranks, silent: bool) -> None:
    assert all(len(losses) == 6 for losses in two_ranks.run(failed, silent))
