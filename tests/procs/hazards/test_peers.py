"""What earlier schedulers got wrong, each as a regression test of this one."""

from __future__ import annotations

from pathlib import Path

import peer_scripts as peers
import pytest
from comparing import check
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
        for figures in two_ranks.run(peers.figures, "mlp", tuple(sizes.items())):
            assert sizes.items() <= figures.items()
            whole = figures["bytes_per_step"]
            assert whole / partition_bytes / 2 < figures["chunks"] <= 2 * whole / partition_bytes


def test_one_row_is_cut(two_ranks: Ranks) -> None:
    """Tensors were cut along their first dimension only."""
    for figures in two_ranks.run(peers.figures, "one_row"):
        assert 1024 * 4 / 256 <= figures["chunks"] <= 2 * 1024 * 4 / 256


def test_sizes_are_bytes(two_ranks: Ranks) -> None:
    """Sizes were counted in elements, whatever their width."""
    for figures in two_ranks.run(peers.figures, "doubles"):
        assert figures["bytes_per_step"] == (8 * 16 + 16) * 8


def test_steps_are_counted(two_ranks: Ranks) -> None:
    """Steps were counted by the first tensor seen, which may be unused."""
    figures = check(two_ranks, peers.unseen_front_parameter)
    assert [stats["steps"] for stats in figures] == [7, 7]


def test_fifo_sends_as_ready(two_ranks: Ranks, tmp_path: Path) -> None:
    sent = two_ranks.run(peers.sends, str(tmp_path))[0]
    layers = [name.partition(".")[0] for _, name in sent]
    assert list(dict.fromkeys(layers)) == ["tail", "middle", "front"]
    assert layers == sorted(layers, reverse=True)


def test_registration_order_does_not_matter(two_ranks: Ranks) -> None:
    check(two_ranks, peers.registered_last_first)


def test_forward_between_backward_and_step(two_ranks: Ranks) -> None:
    """It made step() send everything again."""
    check(two_ranks, peers.forward_between_backward_and_step)


def test_waiting_burns_no_cpu(two_ranks: Ranks) -> None:
    """A poller put unfinished work back into its own queue."""
    reader_s, _ = two_ranks.run(peers.cpu_while_waiting, 0.5)
    assert reader_s < 0.25


def test_never_wrapped(two_ranks: Ranks) -> None:
    assert two_ranks.run(peers.never_wrapped) == [[True, "plain"]] * 2
