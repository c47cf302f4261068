"""A Horovod rank dies, stops, raises or leaves: the others say so in time, and every one ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from horovod_launched import HorovodExits, Kind


HARD_LIMIT_S = 70.0
RUNS_AT_ONCE = 3
ENDED_BY_MPIRUN = -15


@dataclass(frozen=True)
class Scenario:
    kind: Kind
    case: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return "-".join(map(str, (self.kind, self.case, *self.args)))


@dataclass(frozen=True)
class End:
    """How one rank ended, and what it told on the way."""

    code: int
    told: dict[str, Any]
    stderr: str


def run(scenario: Scenario) -> tuple[int, list[End]]:
    """The launcher's exit code, and how each rank ended."""
    import horovod_fault_cases as cases
    from horovod_launched import run_fresh_horovod
    from ranks import new_store

    store = new_store()
    args = (*scenario.args, store.port) if scenario.case == "leave" else scenario.args
    case: Callable[..., None] = getattr(cases, scenario.case)
    exits: HorovodExits = run_fresh_horovod(
        case, scenario.kind, 2, timeout_s=HARD_LIMIT_S, args=args
    )
    return exits.launcher.code, [
        End(rank.code, told_in(rank.stdout), rank.stderr) for rank in exits.ranks
    ]


def told_in(stdout: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for line in stdout.splitlines():
        told |= json.loads(line)
    return told


Ends = Callable[[Scenario], "tuple[int, list[End]]"]


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """How a scenario ended; those of all selected tests run while the tests look at them."""
    from horovod_launched import why_missing

    items = [item for item in request.session.items if item.path == request.path]
    scenarios: list[Scenario] = [item.callspec.params["scenario"] for item in items]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        futures: dict[Scenario, Future[tuple[int, list[End]]]] = {
            scenario: pool.submit(run, scenario)
            for scenario in scenarios
            if not why_missing(scenario.kind)
        }

        def of(scenario: Scenario) -> tuple[int, list[End]]:
            if scenario not in futures:
                pytest.skip(why_missing(scenario.kind))
            return futures[scenario].result()

        yield of
        for future in futures.values():
            future.cancel()


def each(*scenarios: Scenario) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=str)


def fault(kind: Kind, victim: int, moment: str, what: str) -> Scenario:
    return Scenario(kind, "train_until_fault", (victim, moment, what))


def check_told_of(survivor: End, error: str) -> None:
    """The survivor raised that, which is Horovod's as well."""
    told = survivor.told
    assert told.get("error") == error, survivor.stderr
    assert told["ours"]
    assert "HorovodInternalError" in told["kinds"]
    assert told["rank"] is not None
    assert "task" in told["message"]
    # mpirun ends the others with the first that fails, which is that one or the other.
    assert survivor.code in (1, ENDED_BY_MPIRUN), survivor.stderr
    assert told.get("threads_left", []) == []


@each(
    # Horovod would wait for it for ever at the end, on MPI: the survivor ends all the same.
    fault("mpi", 1, "before_backward", "stop"),
    fault("gloo", 0, "before_backward", "stop"),
    fault("gloo", 0, "in_backward", "kill"),
    fault("gloo", 1, "before_backward", "end"),
    fault("gloo", 0, "in_backward", "raise"),
    fault("mpi", 1, "in_forward", "raise"),
)
@pytest.mark.one_in(2)
def test_a_rank_stops_ends_or_raises(scenario: Scenario, ends: Ends) -> None:
    code, ranks = ends(scenario)
    who, _, what = scenario.args
    victim, survivor = ranks[who], ranks[1 - who]
    check_told_of(survivor, "HorovodTimeout" if what == "stop" else "HorovodPeerLost")
    assert code != 0 or what == "stop"
    if what == "raise":
        assert victim.told["error"] == "ValueError"
        # Either is the first to arrive: that it gives up, or that it has ended.
        said = survivor.told["message"]
        assert f"rank {who} gave up" in said or "another rank has ended" in said
        assert "gives up: ValueError: boom" in victim.stderr


@each(fault("mpi", 0, "before_backward", "kill"))
def test_mpirun_ends_the_others_when_a_rank_is_killed(scenario: Scenario, ends: Ends) -> None:
    code, (victim, survivor) = ends(scenario)
    assert code != 0
    assert victim.code == -9
    assert survivor.code != 0
    assert survivor.told["reached"] == "before_backward"


@each(Scenario("gloo", "announce_until_shut_down", ()))
def test_horovod_can_be_shut_down_under_a_rank_that_announces(
    scenario: Scenario, ends: Ends
) -> None:
    _, ranks = ends(scenario)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr
    assert "shut down" in ranks[0].told["message"]


@each(
    Scenario("gloo", "leave", ("falls-off",)),
    Scenario("gloo", "leave", ("shutdown",)),
    Scenario("gloo", "leave", ("horovods-handler-first",)),
    Scenario("mpi", "leave", ("sys-exit",)),
    Scenario("mpi", "leave", ("shutdown",)),
)
@pytest.mark.one_in(3)
def test_the_last_step_is_applied(scenario: Scenario, ends: Ends) -> None:
    _, ranks = ends(scenario)
    for rank in ranks:
        codes = (3, ENDED_BY_MPIRUN) if scenario.args == ("sys-exit",) else (0,)
        assert rank.code in codes, rank.stderr
        assert rank.told["equal"], rank.stderr
        assert rank.told["threads_left"] == []
        assert "error" not in rank.stderr
