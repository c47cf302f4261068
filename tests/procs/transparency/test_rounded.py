"""Parameters that travel rounded: under autocast a forward pass has the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scripts_rounded as rounded
import torch
from comparing import check, named
from ranks import Ranks, address_of
from training import compare

import bytesched
from bytesched.config import Config


@named(rounded.linear, rounded.written, rounded.resumed)
def test_script(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script, shard=True, gather_dtype=torch.bfloat16)


def test_a_checkpoint_of_three_ranks(three_ranks: Ranks) -> None:
    # Sums of three have the order of the ranks, which is not that of DDP: now and then a digit of
    # bfloat16 is another.
    check(three_ranks, rounded.resumed, shard=True, gather_dtype=torch.bfloat16, rtol=1e-2)


def test_unwrapped_parameters_have_all_digits(two_ranks: Ranks) -> None:
    options = {"shard": True, "gather_dtype": torch.bfloat16}
    for found, _ in two_ranks.run(compare, address_of(rounded.unwrapped), (), options):
        assert not found


def test_half_the_bytes_are_sent(two_ranks: Ranks) -> None:
    whole, half = (two_ranks.run(rounded.bytes_sent, dtype) for dtype in (None, "bfloat16"))
    assert [2 * nbytes for nbytes in half] == whole


def test_refused(two_ranks: Ranks) -> None:
    for of_double, other in two_ranks.run(rounded.refusals):
        assert of_double.startswith("PluginError: gather_dtype rounds what is float32")
        assert "is torch.float64" in of_double
        assert other.startswith("MismatchError: ")
        assert "gather_dtype = " in other


def test_setting() -> None:
    assert Config(shard=True, gather_dtype=torch.bfloat16).gather_dtype == "bfloat16"  # type: ignore[arg-type]
    assert Config(gather_dtype="None").gather_dtype is None
    with pytest.raises(bytesched.ConfigError, match="without shard = True"):
        Config(gather_dtype="bfloat16")
    with pytest.raises(bytesched.ConfigError, match="neither bfloat16 nor none"):
        Config(shard=True, gather_dtype="float16")
