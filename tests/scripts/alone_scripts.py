"""Training where a gradient cannot take views of it along: on a GPU, with torch before 2.13."""

from __future__ import annotations

from typing import Any
from unittest import mock

from training import compare

from bytesched.plugins.proxies import lazy_grads


def compare_alone(
    address: tuple[str, str], args: tuple[Any, ...], options: dict[str, Any], rtol: float
) -> Any:
    """`training.compare` with gradients that move alone."""
    with mock.patch.object(lazy_grads, "moves_alone", return_value=True):
        return compare(address, args, options, rtol)
