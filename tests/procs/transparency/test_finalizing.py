"""DDP's `finalize_backward` and `lazy_bucket_allocation` under bytesched: from torch 2.15 on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scripts_finalizing as scripts
from comparing import check, named
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel
from training import Job

pytestmark = pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"), reason="not in this torch"
)


@named(
    scripts.finalized,
    scripts.finalized_views,
    scripts.finalized_static_graph,
    scripts.finalized_and_clipped,
    scripts.finalized_late,
    scripts.finalized_after_no_sync,
    scripts.finalized_first,
    scripts.copied_and_saved,
    scripts.finalized_once_unwrapped,
)
def test_script(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script, kind=scripts.ByHandJob)


def test_views_of_buckets_that_are_dropped(two_ranks: Ranks) -> None:
    check(two_ranks, scripts.views_of_dropped_buckets)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (scripts.lazy_buckets, Job),
        (scripts.lazy_views, Job),
        (scripts.lazy_and_finalized, scripts.ByHandJob),
    ],
)
def test_buckets_that_are_allocated_in_backward_stay_plain(
    two_ranks: Ranks, script: Callable[..., None], kind: type[Job]
) -> None:
    check(two_ranks, script, kind=kind, mode="plain")


@pytest.mark.parametrize("wrapped_from", [0, 3])
@pytest.mark.parametrize("looks_for_unused", [False, True])
def test_a_step_inside_backward(
    two_ranks: Ranks, wrapped_from: int, looks_for_unused: bool
) -> None:
    check(
        two_ranks,
        scripts.finalized_in_backward,
        wrapped_from,
        looks_for_unused,
        kind=scripts.ByHandJob,
    )


def test_finalizing_inside_backward_unasked_is_an_error(two_ranks: Ranks) -> None:
    for message in two_ranks.run(scripts.finalized_unasked):
        assert "before all DDP buckets were ready" in message


def test_ddps_copy_of_the_gradients_is_freed(two_ranks: Ranks) -> None:
    assert min(two_ranks.run(scripts.freed_bytes)) > 30e6
