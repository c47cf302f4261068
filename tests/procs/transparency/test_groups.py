"""Experts that some ranks reduce among themselves: the numbers of a script that does so by hand."""

from __future__ import annotations

import functools
import os
from typing import Any

import groups_scripts as scripts
import pytest
from comparing import Script, cases, each
from comparing import check as compare
from raised import check_survivors
from ranks import Ranks, run_fresh
from restless import RestlessJob

check = functools.partial(compare, mode="")
SCRIPTS = (
    *(scripts.unused, scripts.accumulated, scripts.clipped, scripts.in_a_closure, scripts.scaled),
    *(scripts.saved_and_loaded, scripts.kept_gradients, scripts.compiled),
)


@cases(
    *each(scripts.trained, ("attribute",), (2,), scripts.OPTIMIZERS),
    *each(scripts.trained, ("modules", "parameters"), (2,), ("momentum",)),
    *each(
        scripts.trained,
        ("attribute",),
        (2, 4),
        ("momentum",),
        ({"static_graph": True}, {"gradient_as_bucket_view": True}),
    ),
    *each(scripts.two_optimizers, (2,), ("attribute", "modules")),
    *(case for script in SCRIPTS for case in each(script, (2, 4))),
)
@pytest.mark.one_in(3)
def test_scripts(four_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(four_ranks, script, *args)


@pytest.mark.parametrize("ways", [1, 2])
def test_experts_of_all_ranks_and_of_one(two_ranks: Ranks, ways: int) -> None:
    check(two_ranks, scripts.trained, "attribute", ways, "adamw")


def test_a_plain_module(four_ranks: Ranks) -> None:
    check(four_ranks, scripts.trained, "attribute", 2, "adamw", module_alone=True)
    check(four_ranks, scripts.begun_apart, 2, module_alone=True)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none", "cross_barrier": False},
        {"partition_bytes": 0, "credit_bytes": 0},
        {"policy": "fifo"},
    ],
    ids=str,
)
@pytest.mark.one_in(2)
def test_with_settings(four_ranks: Ranks, options: dict[str, Any]) -> None:
    check(four_ranks, scripts.trained, "attribute", 2, "momentum", **options)


@pytest.mark.parametrize("script", [scripts.unused, scripts.clipped])
@pytest.mark.one_in(2)
def test_sizes_change(four_ranks: Ranks, script: Script) -> None:
    leader, *_ = check(four_ranks, script, 2, kind=RestlessJob)
    assert int(leader["settings"]) > 2


@pytest.mark.parametrize(("ways", "wire"), [(2, "fp16"), (4, "bf16")])
@pytest.mark.one_in(2)
def test_compression_equals_the_hook_of_ddp(four_ranks: Ranks, ways: int, wire: str) -> None:
    check(four_ranks, scripts.compressed, ways, wire, compression=wire)


def test_turns(four_ranks: Ranks) -> None:
    for figures in check(four_ranks, scripts.unused, 2, share=f"groups-{os.getpid()}"):
        assert int(figures["turns"]) >= scripts.STEPS


def test_two_partitions(four_ranks: Ranks) -> None:
    check(four_ranks, scripts.two_partitions)


#: what each of four ranks says, and of what class
REFUSED = {
    "not ignored": ("PluginError", "layers.0.experts.0.weight, layers.0.experts.0.bias"),
    "values": ("MismatchError", "ranks 1, 3 reduce 'module.layers.0.experts.0.weight' and others"),
    "one rank groups less": ("MismatchError", "experts.0.weight is in group 1'"),
    "one rank names all": ("MismatchError", "layers.0.experts.0.weight is in group 1'"),
    "other members": ("MismatchError", "every rank of a group must name the same"),
    "two groups": ("PluginError", "'module.layers.0.experts.0.weight' is in two groups, of ranks"),
    "unknown": ("PluginError", "neither a parameter nor a module of this"),
    "shard": (
        "PluginError",
        "shard = True cannot be for this model: some ranks reduce some parameters",
    ),
    "split": ("PluginError", "split = 'on': gradients go in two halves between two ranks"),
    "hierarchy": ("PluginError", "hierarchy = 'on' is not there"),
    "enabled": ("PluginError", "nothing would reduce the gradients of parameters in groups"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_on_all_ranks(four_ranks: Ranks, case: str) -> None:
    kind, said = REFUSED[case]
    for text in four_ranks.run(scripts.refused, case):
        assert text.startswith(f"{kind}: "), text
        assert said in text


#: what rank 1 says, and the others of it
OF_ONE = {
    "outside": "is a group that rank 1 is not in",
    "no group": "is a list, neither a ProcessGroup nor None",
}


@pytest.mark.parametrize("case", list(OF_ONE))
def test_refused_by_one_rank(four_ranks: Ranks, case: str) -> None:
    for rank, text in enumerate(four_ranks.run(scripts.refused, case)):
        assert text.startswith("PluginError: " if rank == 1 else "MismatchError: "), text
        assert OF_ONE[case] in text


def test_a_destroyed_group_is_refused(four_ranks: Ranks) -> None:
    for text in four_ranks.run(scripts.refused, "destroyed"):
        assert "is a group that was destroyed" in text


def test_groups_are_those_of_the_first_wrap(two_ranks: Ranks) -> None:
    for text in two_ranks.run(scripts.other_groups_later):
        assert "say all groups there" in text


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("moment", ["backward", "step"])
@pytest.mark.one_in(2)
def test_a_death_is_told_in_all_groups(victim: int, moment: str) -> None:
    ended = run_fresh(scripts.dies, world_size=4, args=(victim, moment))
    check_survivors(ended, victim=victim)
