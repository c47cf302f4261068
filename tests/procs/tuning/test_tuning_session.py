"""A session whose sizes change all the time trains as plain DDP does, to the last bit."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparing
import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_rounds as rounds
import scripts_shard as shard
import soak_cases
from comparing import Script, cases, each
from ranks import Ranks
from restless import RestlessJob, replace_tuner
from torch import nn
from training import STEPS, Job, sgd, train

import bytesched
from bytesched.tunable import Decision, RunFacts, Steps
from bytesched.tuning.file import TuningFile
from bytesched.tuning.online import OnlineTuner, find_tuner

check = functools.partial(comparing.check, kind=RestlessJob, mode="")


@cases(
    *each(optimizers.one_optimizer, ("sgd_momentum", "adamw_foreach", "adam_fused")),
    *each(models.one_model, ("tied", "attention", "batch_norm", "raw_kernel")),
    (models.one_model, "checkpoint_reentrant", {"static_graph": True}),
    *each(models.compiled, ("whole", "inner"), ("aot_eager",)),
)
@pytest.mark.one_in(2)
def test_settings_change(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    leader, _ = check(two_ranks, script, *args)
    assert int(leader["settings"]) >= 3


@cases(
    *((script,) for script in soak_cases.scripts().values()),
    (models.unused, "differing_ranks"),
    (rounds.unwrapped_and_wrapped,),
    (rounds.frozen, False, "later"),
    # Chunks have memory of their own on the wire.
    (gradients.compressed, "bf16"),
)
@pytest.mark.one_in(12)
def test_script(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(two_ranks, script, *args)


@cases((shard.adversaries,), (models.different_starts,))
def test_plain_modules(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    """Without DDP there is nothing that scheduling could be left to."""
    check(two_ranks, script, module_alone=True)


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


def spying(config: bytesched.Config) -> Spy:
    tuner = find_tuner(config)
    assert tuner is not None
    tuner.__class__ = Spy
    assert isinstance(tuner, Spy)
    return tuner


def tuned(file: str, steps: int, fields: dict[str, Any]) -> dict[str, Any]:
    """What a rank saw of a training that tunes itself."""
    job = Job(wrapped=True)
    model = job.ddp(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    optimizer = sgd(model, lr=0.01)
    Spy.durations_s, Spy.busy_s, Spy.sent_bytes = (), 0.0, 0
    sizes = set()

    def look(step: int) -> None:
        # The tuner is asked when the first round is over.
        if step:
            stats = bytesched.stats(optimizer)
            is_off = stats["mode"] == "plain"
            sizes.add((stats["partition_bytes"], stats["credit_bytes"], is_off))

    replace_tuner(spying)
    began_s = time.monotonic()
    try:
        bytesched.wrap(optimizer, model, tune=True, tune_file=file, **fields)
        train(
            job,
            model,
            optimizer,
            steps=steps,
            inputs=lambda step: job.inputs(step, 4, WIDTH),
            after_step=look,
        )
        bytesched.unwrap(optimizer)
        ended_s = time.monotonic()
    finally:
        replace_tuner(find_tuner)
    return {
        "sizes": sizes,
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "steps": len(Spy.durations_s),
        "step_s": sum(Spy.durations_s),
        "seconds": ended_s - began_s,
        "busy_s": Spy.busy_s,
        "sent_bytes": Spy.sent_bytes,
    }


SPACE = {"partition_bytes": "64KiB", "tune_steps": 64}


def test_a_training_tunes_itself_and_the_next_one_knows(two_ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    # Twice the steps and more: on a busy machine the cluster may seem to change meanwhile.
    first, other = two_ranks.run(tuned, str(file), 180, SPACE)
    assert first["sizes"] == other["sizes"], "the ranks ran with different sizes"
    assert len(first["sizes"]) > 2
    assert any(off for *_, off in first["sizes"]), "scheduling was never off"
    tuning = TuningFile.read(file)
    assert tuning.steps <= 64
    assert tuning.fingerprint.ranks_per_host == (2,)
    assert tuning.fingerprint.model_bytes == first["bytes"]

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


def failed(silent: bool) -> int:
    """How many steps were trained."""
    replace_tuner(lambda config: Failing(silent=silent))
    try:
        job = Job(wrapped=True)
        model = job.ddp(nn.Linear(8, 4))
        optimizer = bytesched.wrap(sgd(model), model, tune=True)
        train(job, model, optimizer)
        bytesched.unwrap(optimizer)
    finally:
        replace_tuner(find_tuner)
    return len(job.records)


@pytest.mark.parametrize("silent", [True, False])
def test_a_tuner_that_fails_does_not_end_the_training(two_ranks: Ranks, silent: bool) -> None:
    assert two_ranks.run(failed, silent) == [STEPS, STEPS]
