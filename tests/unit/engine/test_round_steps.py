"""What a session that counts its own rounds does about steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bytesched.errors import PluginError
from bytesched.plugins.engine.round_steps import RoundSteps


class Told:
    """Writes down every call, by the name of its object."""

    def __init__(self, log: list[Any], name: str, **fields: Any) -> None:
        self._log, self._name = log, name
        vars(self).update(fields)

    def __getattr__(self, call: str) -> Any:
        def told(*args: Any, **kwargs: Any) -> str:
            self._log.append((f"{self._name}.{call}", *args, *kwargs.values()))
            return f"what {call} returns"

        return told


class Steps:
    def __init__(self) -> None:
        self.log: list[Any] = []
        slots = [SimpleNamespace(parameter=object(), name=name) for name in ("a", "b")]
        phase = Told(self.log, "phase")
        self.rounds: Any = Told(self.log, "rounds", slots=slots, phase=phase)
        self.handover: Any = SimpleNamespace(off=False)
        self.progress: Any = Told(self.log, "progress")
        parts: list[Any] = [self.rounds, self.handover, self.progress]
        self.steps: Any = RoundSteps(*parts)


@pytest.fixture
def made() -> Steps:
    return Steps()


def test_parameters_have_their_names(made: Steps) -> None:
    slots = made.rounds.slots
    assert made.steps.names == {id(slot.parameter): slot.name for slot in slots}


def test_handed_over_they_are_off(made: Steps) -> None:
    assert made.steps.are_off is False
    made.handover.off = True
    assert made.steps.are_off is True


def test_a_step_ends_the_round_unless_there_was_an_error(made: Steps) -> None:
    made.steps.begin()
    assert made.log == [("progress.check",), ("rounds.finish",)]

    def fail() -> None:
        raise PluginError("lost")

    made.progress.check = fail
    with pytest.raises(PluginError, match="lost"):
        made.steps.begin()
    assert len(made.log) == 2


def test_the_rest_is_up_to_the_life_of_the_moment(made: Steps) -> None:
    deferred = object()
    made.steps.introduce(deferred)
    assert made.steps.step(deferred, whole_because="a mode") == "what step returns"
    made.rounds.phase = Told(made.log, "second life")
    made.steps.stepped()
    made.steps.synchronize_all()
    assert made.log == [
        ("phase.introduce", deferred),
        ("phase.step", deferred, "a mode"),
        ("second life.stepped",),
        ("second life.synchronize_all",),
    ]
