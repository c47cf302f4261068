"""What earlier schedulers got wrong, each as a regression test of this one."""

from __future__ import annotations

from typing import Any

import peer_scripts as peers
import pytest
from comparing import Script, cases, check, of
from plugin_suite import PluginContract
from ranks import Ranks


@pytest.mark.parametrize(
    "name", sorted(name for name in vars(PluginContract) if name.startswith("test_"))
)
def test_contract(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(peers.contract, name)


def test_partition_size_takes_effect(two_ranks: Ranks) -> None:
    """A knob that was written to one name and read from another."""
    for partition_bytes, credit_bytes in ((256, 512), (1024, 4096)):
        sizes = {"partition_bytes": partition_bytes, "credit_bytes": credit_bytes}
        for figures in two_ranks.run(peers.figures, sizes):
            assert sizes.items() <= figures.items()
            whole = figures["bytes_per_step"]
            assert whole / partition_bytes / 2 < figures["chunks"] <= 2 * whole / partition_bytes


@cases(
    *of(peers, "registered_last_first unseen_front_parameter"),
    # It made step() send everything again.
    *of(peers, "forward_between_backward_and_step"),
)
def test_steps_are_counted(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    """Steps were counted by the first tensor seen, which may be unused."""
    assert [stats["steps"] for stats in check(two_ranks, script)] == [7, 7]


def test_waiting_burns_no_cpu(two_ranks: Ranks) -> None:
    """A poller put unfinished work back into its own queue."""
    reader_s, _ = two_ranks.run(peers.cpu_while_waiting, 0.5)
    assert reader_s < 0.25


def test_never_wrapped(two_ranks: Ranks) -> None:
    assert two_ranks.run(peers.never_wrapped) == [[True, "plain"]] * 2
