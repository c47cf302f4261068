"""DDP's `finalize_backward` and `lazy_bucket_allocation` under bytesched: from torch 2.15 on."""

from __future__ import annotations

from typing import Any

import pytest
import scripts_finalizing as scripts
from comparing import Script, cases, check, each, of
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel
from training import Job

pytestmark = pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"), reason="not in this torch"
)


@cases(
    *each(scripts.finalized, ({}, {"gradient_as_bucket_view": True}, {"static_graph": True})),
    *of(
        scripts,
        """
        finalized_and_clipped finalized_late finalized_after_no_sync finalized_first
        finalized_once_unwrapped copied_and_saved
        """,
    ),
    *each(scripts.finalized_in_backward, (0, 3), (False, True)),
)
def test_script(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(two_ranks, script, *args, kind=scripts.ByHandJob)


def test_views_of_buckets_that_are_dropped(two_ranks: Ranks) -> None:
    check(two_ranks, scripts.views_of_dropped_buckets)


LAZY = {"lazy_bucket_allocation": True}


@pytest.mark.parametrize(
    ("script", "arguments", "kind"),
    [
        (scripts.lazy_buckets, LAZY, Job),
        (scripts.lazy_buckets, LAZY | {"gradient_as_bucket_view": True}, Job),
        (scripts.finalized, LAZY, scripts.ByHandJob),
    ],
)
def test_buckets_that_are_allocated_in_backward_stay_plain(
    two_ranks: Ranks, script: Script, arguments: dict[str, bool], kind: type[Job]
) -> None:
    check(two_ranks, script, arguments, kind=kind, mode="plain")


def test_finalizing_inside_backward_unasked_is_an_error(two_ranks: Ranks) -> None:
    for message in two_ranks.run(scripts.finalized_unasked):
        assert "before all DDP buckets were ready" in message


def test_ddps_copy_of_the_gradients_is_freed(two_ranks: Ranks) -> None:
    assert min(two_ranks.run(scripts.freed_bytes)) > 30e6
