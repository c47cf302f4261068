"""Each pool of Horovod ranks has the controller that the tests of it are meant for."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.nightly]


def controllers() -> tuple[bool, bool]:
    import horovod.torch as hvd

    return hvd.gloo_enabled(), hvd.mpi_enabled()


@pytest.mark.parametrize("kind", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_pool_runs_the_controller_it_is_named_after(
    kind: str, request: pytest.FixtureRequest
) -> None:
    pools = request.getfixturevalue(f"hvd_{kind}")
    assert pools(2).run(controllers) == [(kind == "gloo", kind == "mpi")] * 2
