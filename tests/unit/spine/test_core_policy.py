"""Policies: found by name, registered once, and asked by the core."""

from __future__ import annotations

import pytest
from plans import planned, ready

from bytesched.core import SchedulerCore
from bytesched.errors import ConfigError
from bytesched.order import Leading
from bytesched.policy import Fifo, named_policy, policy_names, register_policy
from bytesched.task import CommTask


def test_policies_are_found_by_name() -> None:
    assert {"fifo", "priority"} <= set(policy_names())
    assert isinstance(named_policy("fifo"), Fifo)
    with pytest.raises(ConfigError, match="priority"):
        named_policy("prioritty")


def test_a_policy_is_registered_once() -> None:
    class Smallest:
        def key(self, task: CommTask) -> float:
            return task.nbytes

    register_policy("test-smallest", Smallest)
    register_policy("test-smallest", Smallest)
    with pytest.raises(ConfigError, match="registered already"):
        register_policy("test-smallest", Fifo)
    core = SchedulerCore(Leading(named_policy("test-smallest")), credit_bytes=1)
    order = [started for task in planned([5, 9, 3, 7]) for started in ready(core, task)]
    for task in order:
        order.extend(core.finish(task))
    assert [task.nbytes for task in order] == [5, 3, 7, 9]
