"""Generated reads and writes of what is outstanding; `./scripts/fuzz` tries more of them."""

from __future__ import annotations

from typing import Any

import fuzzing
import pytest
import torch

from bytesched.plugins.proxies import pending, pending_grads
from bytesched.plugins.proxies.pending import METADATA

SEEDS, AT_A_TIME = 60, 10


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
@pytest.mark.one_in(6)
def test_generated_sequences_equal_plain_training(first: int) -> None:
    for seed in range(first, first + AT_A_TIME):
        found = fuzzing.fuzzed(seed)
        assert not found, f"seed {seed}:\n" + "\n".join(found[:10])


@pytest.mark.parametrize("seed", [3, 5, 12, 14, 25, 34, 49])
@pytest.mark.one_in(3)
def test_an_optimizer_that_torch_does_not_have(seed: int) -> None:
    """Hooks, norms, tensors in groups, globals that change, and arguments of `step()`."""
    assert not fuzzing.fuzzed(seed, unknown_share=1.0)


def test_a_hole_in_the_guard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer that cannot fail proves nothing."""
    hole: Any = frozenset(
        {
            getattr(torch.Tensor, use.name.removeprefix("Tensor."))
            for use in fuzzing.catalogue()[0]
            if use.name.startswith("Tensor.") and "," not in use.name
        }
    )
    for module in (pending, pending_grads):
        monkeypatch.setattr(module, "METADATA", METADATA | hole)
    assert any(fuzzing.fuzzed(seed) for seed in range(40))
