"""The tuner as a session sees it, on a simulated cluster: words, memory, log lines."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy
import pytest
from paths import SUPPORT
from tuning_cluster import Cluster, Link, exact_step_s, train, tuner_on

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.tunable import Decision, Setting, Steps
from bytesched.tuning.file import TuningFile
from bytesched.tuning.memory import Memory
from bytesched.tuning.online import OnlineTuner, find_tuner
from bytesched.tuning.space import Given

MIB = 1 << 20


Known = tuple[Memory, TuningFile]


def found_in(folder: Path) -> TuningFile:
    """The only one there."""
    (path,) = folder.glob("*.json")
    return TuningFile.read(path)


@pytest.fixture
def known(tmp_path: Path) -> Known:
    """A memory, and what it has of the cluster as it comes."""
    cluster, memory = Cluster(), Memory(folder=tmp_path)
    train(cluster, tuner_on(cluster, tmp_path), 200)
    return memory, found_in(tmp_path)


@pytest.fixture(autouse=True)
def nobody_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may leave its tuner in the middle of a tuning."""
    monkeypatch.setattr(OnlineTuner, "_at_work", None)


@pytest.mark.parametrize(
    ("model", "rate"), [("gpt", 118e6), ("gpt", 2e9), ("vgg", 118e6), ("resnet", 30e6)]
)
@pytest.mark.one_in(4)
def test_from_the_first_step_to_a_file_that_is_used(
    model: str, rate: float, tmp_path: Path
) -> None:
    """Within 3 % of the best in at most 150 steps; the next run begins with it."""
    link = Link(4e-4, rate, 8e-4)
    cluster = Cluster(model, link, noise=0.01)
    tuner = tuner_on(cluster, tmp_path)
    found = train(cluster, tuner, 300).setting
    tuner.close()
    untuned = cluster.facts().untuned
    assert len(set(cluster.history[150:])) == 1
    best_s = cluster.best_step_s(
        tuple(Setting(p << 16, w * p << 16) for p in (2, 4, 8, 16, 32, 64) for w in (1, 2, 3, 4))
    )
    assert exact_step_s(model, link, found) <= 1.03 * best_s
    assert exact_step_s(model, link, found) <= 1.01 * exact_step_s(model, link, untuned)

    again = Cluster(model, link, noise=0.01, seed=1)
    assert train(again, tuner_on(again, tmp_path), 200).setting == found
    assert set(again.history) == {found}, "a known cluster costs no step"


@pytest.mark.nightly
def test_what_was_tuned_for_other_steps_is_tuned_again(tmp_path: Path, known: Known) -> None:
    memory, tuning = known
    memory.save(replace(tuning, step_ms=4 * tuning.step_ms))
    larger = Cluster()
    train(larger, tuner_on(larger, tmp_path), 400)
    assert len(set(larger.history)) > 1
    again = found_in(tmp_path)
    assert again.step_ms == pytest.approx(tuning.step_ms, rel=0.05)


@pytest.mark.nightly
def test_a_setting_from_a_file_that_would_never_end_is_not_used(
    tmp_path: Path, known: Known, caplog: pytest.LogCaptureFixture
) -> None:
    memory, tuning = known
    unusable = Setting(16, 64), Setting(MIB, MIB, "nosuch"), Setting(MIB, MIB, "nosuch", False)
    for setting in unusable:
        memory.save(replace(tuning, setting=setting))
        for model in ("gpt", "vgg"):
            again = Cluster(model)
            train(again, tuner_on(again, tmp_path), 60)
            assert setting not in again.history
    assert "would cut this model into 2804000 chunks" in caplog.text
    assert "is ignored" in caplog.text


def test_the_log_tells_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bytesched")
    cluster = Cluster()
    train(cluster, tuner_on(cluster, tmp_path), 200)
    lines = [record.getMessage() for record in caplog.records]
    assert "at most 150 steps" in lines[0]
    assert any(line.startswith("tuning: trial 2 of about ") for line in lines)
    assert any("done in" in line and str(tmp_path) in line for line in lines)
    assert lines[-1].startswith("tuning: to fix it: BYTESCHED_PARTITION_BYTES=")
    assert max(map(len, lines)) < 220


def test_one_chunk_is_not_tuned(tmp_path: Path) -> None:
    cluster = Cluster()
    small = {"model_bytes": 9000, "untuned": Setting(MIB, 2 * MIB)}
    train(cluster, tuner_on(cluster, tmp_path), 150, **small)
    assert set(cluster.history) == {small["untuned"]}


@pytest.mark.nightly
def test_a_drift_is_tuned_away_from_what_is_measured(tmp_path: Path) -> None:
    def event(cluster: Cluster, step: int) -> None:
        if step == 400:
            cluster.link = Link(4e-4, 40e6, 8e-4)

    cluster = Cluster(noise=0.01, event=event)
    tuner = tuner_on(cluster, tmp_path)
    train(cluster, tuner, 1500)
    tuner.close()
    (setting,) = dict.fromkeys(cluster.history[1000:])
    again = found_in(tmp_path)
    assert again.setting == setting
    assert again.fingerprint.bytes_per_s < 60e6
    later = Cluster(link=Link(4e-4, 40e6, 8e-4))
    assert train(later, tuner_on(later, tmp_path), 100).setting == setting
    assert set(later.history) == {setting}


_DRAWS = """
import random, sys
from pathlib import Path
import numpy
sys.path.insert(0, sys.argv[1])
from tuning_cluster import Cluster, train, tuner_on
cluster = Cluster()
random.seed(1)
numpy.random.seed(1)
train(cluster, tuner_on(cluster, Path(sys.argv[2])), 200)
print(random.random(), numpy.random.random())
"""


@pytest.mark.nightly
def test_it_draws_no_number_of_the_scripts(tmp_path: Path) -> None:
    """In a process that has imported nothing of what tuning needs."""
    command = [sys.executable, "-c", _DRAWS, str(SUPPORT), str(tmp_path)]
    drawn = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    own, numpy_s = random.Random(1), numpy.random.RandomState(1)
    assert drawn == [str(own.random()), str(numpy_s.random())]


def test_an_order_that_is_planned_has_time_to_settle(tmp_path: Path) -> None:
    cluster = Cluster()
    tuner = tuner_on(cluster, tmp_path)
    unplanned = tuner.begin(cluster.facts())
    tuner.close()
    settles = tuner_on(cluster, tmp_path).begin(cluster.facts(first_steps=6))
    assert settles.setting == unplanned.setting
    assert settles.next_in_steps == unplanned.next_in_steps + 4


@dataclass
class Model:
    """One of several that are trained in turns, with its tuner."""

    cluster: Cluster
    tuner: OnlineTuner

    def __post_init__(self) -> None:
        self.untuned = self.cluster.facts().untuned
        self.word = self.tuner.begin(self.cluster.facts())
        self._durations_s: list[float] = []

    def step(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)
        if len(self._durations_s) == self.word.next_in_steps:
            steps = Steps(tuple(self._durations_s), 0.0, 0, 0)
            self._durations_s.clear()
            self.word = self.tuner.decide(steps)


@pytest.mark.nightly
@pytest.mark.parametrize("stops_after", [1000, 20])
def test_two_models_are_tuned_one_after_the_other(stops_after: int, tmp_path: Path) -> None:
    """A step of one holds a step of the other. The first may end before it is tuned."""
    clusters = [Cluster("gpt"), Cluster("vgg", noise=0.01)]
    models = [Model(cluster, tuner_on(cluster, tmp_path)) for cluster in clusters]
    states = []
    for step in range(600):
        trained = models if step < stops_after else models[1:]
        states.append([model.word.setting for model in trained])
        duration_s = sum(model.cluster.step_s(model.word.setting) for model in trained)
        for model in trained:
            model.step(duration_s)
    done = {TuningFile.read(path).fingerprint.signature for path in tmp_path.glob("*.json")}
    assert done == ({"gpt", "vgg"} if stops_after == 1000 else {"vgg"})
    last = states[-1]
    if stops_after == 1000:
        for now in states:
            trying = [
                s not in (m.untuned, s_last) for s, m, s_last in zip(now, models, last, strict=True)
            ]
            assert not all(trying), now


@pytest.mark.nightly
def test_words_keep_to_the_seed(tmp_path: Path) -> None:
    def words(folder: Path) -> list[Decision]:
        cluster = Cluster(noise=0.02, seed=7)
        tuner = tuner_on(cluster, folder)
        first = tuner.begin(cluster.facts())
        said = [first, *islice(cluster.turns(tuner, first), 25)]
        tuner.close()
        return said

    assert words(tmp_path / "a") == words(tmp_path / "b")


def test_a_run_that_ends_early_leaves_nothing_to_be_used_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bytesched")
    cluster = Cluster()
    tuner = tuner_on(cluster, tmp_path)
    train(cluster, tuner, 30)
    tuner.close()
    assert not list(tmp_path.glob("*.json"))
    assert "the training ended first; fastest so far" in caplog.messages[-1]
    assert "BYTESCHED_PARTITION_BYTES=" in caplog.messages[-1]


def test_steps_that_were_not_measured_do_not_end_it(tmp_path: Path) -> None:
    cluster = Cluster()
    tuner = tuner_on(cluster, tmp_path)
    tuner.begin(cluster.facts())
    for _ in range(50):
        assert tuner.decide(Steps(())).next_in_steps >= 1


def test_whoever_does_not_ask_gets_none() -> None:
    assert find_tuner(Config()) is None
    assert find_tuner(Config(tune=True, enabled=False)) is None
    assert find_tuner(Config(tune=True, tune_file="x.json")) is not None


def test_nothing_to_tune_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="nothing to tune"):
        find_tuner(Config(tune=True, partition_bytes=MIB, credit_bytes=MIB))


def test_a_missing_package_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytesched.tuning.online._NEEDED", ("numpy", "no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package.*pip install 'bytesched\[tune\]'"):
        find_tuner(Config(tune=True))


def test_what_is_given_stays(tmp_path: Path) -> None:
    cluster = Cluster()
    untuned = Setting(MIB, 2 * MIB)
    train(cluster, tuner_on(cluster, tmp_path, Given(MIB)), 100, untuned=untuned)
    assert {setting.partition_bytes for setting in cluster.history} == {MIB}
    assert len(set(cluster.history)) > 2


def test_a_link_without_overhead_has_a_seed(tmp_path: Path) -> None:
    cluster = Cluster(link=Link(0.0, 1e9))
    train(cluster, tuner_on(cluster, tmp_path), 60)
    assert len(set(cluster.history)) > 2
