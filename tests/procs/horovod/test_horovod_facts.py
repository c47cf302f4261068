"""What is true of a wrapped Horovod optimizer beside equal numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from horovod_launched import run_fresh_horovod, why_missing
from plugin_suite import PluginContract
from training import differences

if TYPE_CHECKING:
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]
Told = dict[str, Any]


@pytest.fixture
def cases(hvd_gloo: Pools) -> ModuleType:
    """The cases, which import Horovod."""
    import horovod_cases

    return horovod_cases


@pytest.fixture(scope="module")
def own_pool(hvd_gloo: Pools) -> Iterator[Ranks]:
    """For cases that leave operations behind, which no other rank will ever take part in."""
    from horovod_forked import HorovodRanks

    ranks = HorovodRanks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", [name for name in dir(PluginContract) if "test_" in name])
def test_plugin_contract(hvd_gloo: Pools, cases: ModuleType, name: str) -> None:
    hvd_gloo(2).run(cases.plugin_contract, name)


@pytest.mark.parametrize("how", ["synchronize", "read", "sparse"])
def test_waiting_takes_no_cpu(hvd_gloo: Pools, cases: ModuleType, how: str) -> None:
    """Horovod's own `synchronize` asks without a pause."""
    seconds = 1.0
    assert hvd_gloo(2).run(cases.cpu_while_waiting, how, seconds)[0] < 0.5 * seconds


@pytest.mark.parametrize(
    "kind",
    [
        *("layers", "shape", "dtype", "frozen", "optimizer", "partition_bytes", "policy"),
        *("passes", "op", "predivide", "compression"),
    ],
)
def test_ranks_that_differ(hvd_gloo: Pools, cases: ModuleType, kind: str) -> None:
    for rank, told in enumerate(hvd_gloo(2).run(cases.different_on_rank_1, kind)):
        assert told["kinds"][0] == "MismatchError"
        assert f"seen by rank {rank}" in told["message"]


def check_gave_up(told: Told, culprit: int) -> None:
    """Another rank heard, at once, of the one that goes on without them."""
    assert told["kinds"][0] == "HorovodPeerLost"
    assert "HorovodInternalError" in told["kinds"]
    assert f"rank {culprit} gave up" in told["message"]
    assert (told["rank"], bool(told["task"])) == (1 - culprit, True)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_sparse_gradients_that_nothing_announced(
    own_pool: Ranks, cases: ModuleType, who: tuple[int, ...], step: int
) -> None:
    for rank, told in enumerate(own_pool.run(cases.unannounced_sparse, who, step)):
        if rank in who:
            assert told["kinds"][0] == "PluginError"
            assert f"gradient of 'table' is sparse on rank {rank}" in told["message"]
            assert "nn.Embedding(sparse=True)" in told["message"]
        else:
            check_gave_up(told, who[0])


#: what rank `who` does, and then lives on
LIVES_ON: list[tuple[Any, ...]] = [
    *(
        ("caught", moment, step, False)
        for moment, steps in (
            ("now", (0, 1, 3)),
            ("when nothing is under way", (1, 3)),
            ("in the next forward pass", (0, 1, 3)),
        )
        for step in steps
    ),
    # Then what is announced are the chunks of the latest cut.
    ("caught", "now", 3, True),
    ("caught", "when nothing is under way", 3, True),
    *(("caught", "now", step, False, "fp16") for step in (0, 1, 3)),
    *(("failed_update", tuned, is_owed) for tuned in (False, True) for is_owed in (False, True)),
]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("case", LIVES_ON, ids=str)
@pytest.mark.one_in(2)
def test_the_others_hear_of_an_error(
    own_pool: Ranks, cases: ModuleType, case: tuple[Any, ...], who: int
) -> None:
    name, *args = case
    told = own_pool.run(getattr(cases, name), who, *args)
    check_gave_up(told[1 - who], who)
    if name == "caught":
        assert told[who]["kinds"][0] == "ArithmeticError"
    else:
        assert told[who]["kinds"][0] == "RuntimeError"
        assert "size of tensor" in told[who]["message"]
        assert told[who]["steps"] == 3 + args[-1]


@pytest.mark.parametrize("who", [0, 1])
# The first round of a tuned one ends with a measurement of the link.
@pytest.mark.parametrize(("after_steps", "tuned"), [(0, False), (1, False), (3, False), (0, True)])
@pytest.mark.one_in(12)
def test_the_others_hear_of_a_timeout(
    own_pool: Ranks, cases: ModuleType, who: int, after_steps: int, tuned: bool
) -> None:
    told = own_pool.run(cases.gave_up_waiting, who, after_steps, tuned)
    assert told[who]["kinds"][0] == "HorovodTimeout"
    check_gave_up(told[1 - who], who)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.one_in(2)
def test_waiting_for_sparse_gradients_ends(own_pool: Ranks, cases: ModuleType, who: int) -> None:
    told = own_pool.run(cases.gave_up_waiting_for_sparse, who)[who]
    assert told["kinds"][0] == "HorovodTimeout"
    assert "waited 4 s for what Horovod reduces itself" in told["message"]


def test_joined_while_tuned(own_pool: Ranks, cases: ModuleType) -> None:
    """Otherwise, rank 0's word would be a sum of zeros."""
    early, other = own_pool.run(cases.joined_while_tuned)
    assert early["kinds"][0] == "PluginError"
    assert "hvd.join() with tune on" in early["message"]
    # It waits for the word, or for a chunk.
    assert other["kinds"][0] == "HorovodPeerLost"


LEFT = {
    "bf16": "Horovod cannot reduce bf16",
    "compressor": "Rounded may need a tensor as a whole",
    "disabled": "enabled is off",
    "sparse": "none of the model's parameters is reduced by this optimizer in dense form",
    "autotune": "HOROVOD_AUTOTUNE is on",
}


def check_left(outcomes: list[Told], reason: str) -> None:
    for rank, told in enumerate(outcomes):
        assert (told["untouched"], told["equal"], told["mode"]) == (True, True, "plain")
        assert [reason in line for line in told["said"]] == [True] * (rank == 0)


@pytest.mark.parametrize("kind", LEFT)
def test_left_as_it_was(hvd_gloo: Pools, cases: ModuleType, kind: str) -> None:
    check_left(hvd_gloo(2).run(cases.left_as_it_was, kind), LEFT[kind])


def test_chunks_are_planned(hvd_gloo: Pools, cases: ModuleType) -> None:
    assert hvd_gloo(2).run(cases.planned_order, 3) == [None, None]
    one, other = hvd_gloo(2).run(cases.planned_order, 7)
    assert one == other
    assert len(one) > 6


def test_wrapped_by_class_name(hvd_gloo: Pools, cases: ModuleType) -> None:
    assert hvd_gloo(2).run(cases.wrapped_by_class_name) == [(True, "cross")] * 2


def test_ranks_agree_after_a_closure(hvd_gloo: Pools, cases: ModuleType) -> None:
    """Plain Horovod steps before the gradients of the closure have arrived."""
    one, other = hvd_gloo(2).run(cases.weights_after_closures)
    assert not list(differences(one, other, "weights"))


def test_adasum_is_left_as_it_was() -> None:
    if reason := why_missing("mpi"):
        pytest.skip(reason)
    import horovod_cases

    exits = run_fresh_horovod(horovod_cases.prints_what_is_left, "mpi", args=("adasum",))
    said = [json.loads(rank.stdout.splitlines()[-1]) for rank in exits.ranks]
    check_left(said, "Adasum combines updates")
