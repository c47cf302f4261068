"""All-to-alls of a script that nobody has touched: sections from their call to their end."""

from __future__ import annotations

import atexit
import textwrap
from collections.abc import Callable, Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

from bytesched.run import urgent_calls
from bytesched.run.urgent_calls import mark_all_to_alls
from bytesched.urgency import URGENCY

HAS_HOOKS = hasattr(dist.ProcessGroup, "register_post_hook")
needs_hooks = pytest.mark.skipif(not HAS_HOOKS, reason="process groups have no hooks")


class Work:
    def __init__(self) -> None:
        self.ends: list[Callable[[Any], None]] = []

    def get_future(self) -> Work:
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.ends.append(callback)


def sections() -> int:
    return len(URGENCY._sections)


# -- hooks of process groups ------------------------------------------------------------


class Group:
    """As torch's, from 2.15 on."""

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[Any], None]] = {}

    def register_post_hook(self, number: int, hook: Callable[[Any], None]) -> None:
        self.hooks[number] = hook

    def unregister_post_hook(self, number: int) -> None:
        self.hooks.pop(number, None)

    def issue(self, kind: str, work: Any) -> None:
        for hook in self.hooks.values():
            hook(SimpleNamespace(name=SimpleNamespace(name=kind), work=work))


def with_hooks(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Group]:
    """What stands in for ``distributed_c10d``, and a group in it."""
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    groups: dict[Group, None] = {}
    module = SimpleNamespace(
        ProcessGroup=Group,
        _world=SimpleNamespace(pg_map=groups),
        _register_process_group=lambda _, group: groups.update({group: None}),
    )
    earlier = Group()
    module._register_process_group("earlier", earlier)
    mark_all_to_alls(module)
    return module, earlier


@pytest.mark.parametrize("kind", ["ALLTOALL", "ALLTOALL_BASE"])
def test_one_on_a_group_is_urgent_until_its_work_ends(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    module, earlier = with_hooks(monkeypatch)
    later = Group()
    module._register_process_group("later", later)
    assert later in module._world.pg_map
    for group in (earlier, later):
        work = Work()
        group.issue(kind, work)
        assert sections() == 1
        work.ends[0](work)
        assert sections() == 0


def test_nothing_else_on_a_group_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none() -> Work:
        raise RuntimeError("no futures here")

    _, group = with_hooks(monkeypatch)
    group.issue("ALLREDUCE", Work())
    group.issue("ALLTOALL", None)
    group.issue("ALLTOALL", SimpleNamespace(get_future=has_none))
    assert sections() == 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Event]]]:
    """Name and end of every section, in a world of one rank that is watched."""
    began: list[tuple[str, Event]] = []

    def begin(name: str) -> Any:
        began.append((name, Event()))
        return SimpleNamespace(end=began[-1][1].set)

    names = ("_register_process_group",) if HAS_HOOKS else ("all_to_all", "all_to_all_single")
    for name in names:
        for module in (distributed_c10d, dist):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(urgent_calls, "begin", begin)
    mark_all_to_alls(distributed_c10d)
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    try:
        yield began
    finally:
        dist.destroy_process_group()


def ended(seen: list[tuple[str, Event]]) -> list[str]:
    """The names of all sections, once they are over."""
    assert all(end.wait(30) for _, end in seen)
    return [name for name, _ in seen]


def test_calls_of_torch(seen: list[tuple[str, Event]]) -> None:
    x, out = torch.arange(4.0), torch.empty(4)
    dist.all_to_all_single(out, x)
    work = dist.all_to_all_single(out, x, async_op=True)
    assert work is not None
    work.wait()
    dist.all_to_all([out], [x])
    dist.all_reduce(out)
    with pytest.raises(RuntimeError, match="Split sizes"):
        dist.all_to_all_single(out, x, [1], [3])
    failed = [] if HAS_HOOKS else ["all_to_all_single"]
    assert ended(seen) == ["all_to_all_single", "all_to_all_single", "all_to_all", *failed]


@pytest.mark.filterwarnings("ignore")
def test_differentiable_calls_of_torch(seen: list[tuple[str, Event]]) -> None:
    from torch.distributed.nn.functional import all_to_all_single

    x = torch.arange(4.0, requires_grad=True)
    all_to_all_single(torch.empty(4), x, group=dist.group.WORLD).sum().backward()
    assert x.grad is not None
    assert ended(seen) == ["all_to_all_single"] * 2


@needs_hooks
def test_functional_collectives(seen: list[tuple[str, Event]]) -> None:
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(4.0, requires_grad=True)
    functional.all_to_all_single(x.detach(), None, None, group).sum().item()
    functional.all_to_all_single_autograd(x, None, None, group).sum().backward()
    assert x.grad is not None
    assert ended(seen) == ["all_to_all_single"] * 3


@needs_hooks
def test_our_own_groups_have_no_hooks(seen: list[tuple[str, Event]]) -> None:
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    backend.alltoall_base(torch.empty(4), torch.ones(4), [], []).wait()
    assert ended(seen) == []


@needs_hooks
def test_a_group_that_is_never_destroyed_does_not_end_in_a_crash(
    python: Callable[..., str],
) -> None:
    source = """
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d
        from torch.distributed._functional_collectives import all_to_all_single
        from bytesched.run.urgent_calls import mark_all_to_alls

        mark_all_to_alls(distributed_c10d)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # After a functional collective, its group outlives the interpreter.
        all_to_all_single(torch.ones(4), None, None, dist.group.WORLD).sum().item()
    """
    python("-c", textwrap.dedent(source))
