"""The entry of every backward pass; and what takes tensors past `__torch_function__` waits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Backend, HashStore
from torch.utils.checkpoint import checkpoint

from bytesched.errors import PluginError
from bytesched.plugins.proxies import entries, passes
from bytesched.plugins.proxies.entries import guard_entries
from bytesched.plugins.proxies.passes import watch_passes
from bytesched.plugins.proxies.pending import hold


class Watching:
    """Writes down what it is told, and what is under way by then."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ended = 0
        self.end = watch_passes(self)
        self.begins: Callable[[], object] = lambda: None
        self.in_place: BaseException | None = None

    def backward_begins(self) -> None:
        self.told.append("begins" if torch._C._current_graph_task_id() == -1 else "inside")
        self.begins()

    def backward_ends(self) -> None:
        self.ended += 1

    def backward_failed(self, error: BaseException) -> BaseException:
        self.told.append(type(error).__name__)
        return error if self.in_place is None else self.in_place


@pytest.fixture
def watching() -> Iterator[Watching]:
    watching = Watching()
    yield watching
    watching.end()


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


#: every way into autograd's engine
PASSES: dict[str, Callable[[Tensor], object]] = {
    "Tensor.backward": lambda weight: weight.sum().backward(),
    "autograd.backward": lambda weight: torch.autograd.backward([weight.sum()]),
    "autograd.grad": lambda weight: torch.autograd.grad(weight.sum(), [weight]),
    "create_graph": lambda weight: torch.autograd.grad(
        weight.square().sum(), [weight], create_graph=True
    ),
    "jacobian": lambda weight: torch.autograd.functional.vjp(torch.sum, weight.detach()),
    "in part": lambda weight: weight.sum().backward(inputs=[weight]),
}


@pytest.mark.parametrize("way", PASSES)
def test_a_pass_is_told_before_it_begins(way: str, watching: Watching, weight: Any) -> None:
    watching.begins = lambda: weight.data.fill_(2.0)
    PASSES[way](weight)
    assert watching.told == ["begins"]
    assert weight.tolist() == [2.0] * 3


def test_passes_inside_of_one_are_not_told(watching: Watching, weight: nn.Parameter) -> None:
    """What is from before has come; what is under way by then belongs to the pass around it."""
    inner: list[Tensor] = []
    other = nn.Parameter(torch.ones(3))

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            inner.extend(torch.autograd.grad(other.sin().sum(), [other]))

    weight.register_hook(hook)
    checkpoint(torch.exp, weight, use_reentrant=True).sum().backward()
    assert watching.told == ["begins"]
    assert torch.equal(inner[0], torch.ones(3).cos())


def test_all_that_watch_are_told_until_they_end(weight: nn.Parameter) -> None:
    one, two = Watching(), Watching()
    weight.sum().backward()
    one.end()
    weight.sum().backward()
    two.end()
    weight.sum().backward()
    assert (one.told, two.told) == (["begins"], ["begins"] * 2)
    assert (one.ended, two.ended) == (1, 2)


def test_torch_is_patched_once(watching: Watching) -> None:
    before = _entries()
    Watching().end()
    assert _entries() == before


def _entries() -> list[Any]:
    return [getattr(module, passes._NAME) for module in (torch.autograd.graph, torch.autograd)]


def test_what_a_watcher_raises_ends_the_pass_before_it_begins(
    watching: Watching, weight: nn.Parameter
) -> None:
    def refuse() -> None:
        raise PluginError("lost")

    watching.begins = refuse
    with pytest.raises(PluginError, match="lost"):
        weight.sum().backward()
    assert weight.grad is None
    assert watching.told == ["begins"]


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("in a hook")


def test_another_error_in_its_place_has_it_as_its_cause(
    watching: Watching, weight: nn.Parameter
) -> None:
    other = Watching()
    watching.in_place = PluginError("rank 1 is gone")
    weight.register_hook(_fail)
    with pytest.raises(PluginError, match="rank 1 is gone") as raised:
        weight.sum().backward()
    assert isinstance(raised.value.__cause__, ArithmeticError)
    assert other.told == ["begins", "PluginError"]
    other.end()


@pytest.mark.parametrize("module", [torch.autograd.graph, torch.autograd])
def test_a_torch_without_a_common_entry_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, passes._NAME)
    with pytest.raises(PluginError, match=r"has no _engine_run_backward, .*BYTESCHED_ENABLED=0"):
        Watching()


KINDS = [dist.ProcessGroup, Backend]
if hasattr(_distributed_c10d, "Window"):
    KINDS += [_distributed_c10d.Window]


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_process_groups_that_takes_tensors_waits(kind: type) -> None:
    guard_entries()
    takes = {
        name
        for name, method in vars(kind).items()
        # Of pybind11: the signatures stand in it.
        if any(
            re.search(r"\(.*torch\.Tensor.*\) ->", line)
            for line in (getattr(inspect.unwrap(method), "__doc__", None) or "").splitlines()
        )
    }
    assert takes & {"allreduce", "put"}
    assert {name for name in takes if not hasattr(getattr(kind, name), "__wrapped__")} == set()


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank of torch.distributed."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("other", [torch.float64, torch.float32])
def test_what_decides_numbers_is_changed_behind_updates_that_are_owed(
    monkeypatch: pytest.MonkeyPatch, other: torch.dtype
) -> None:
    guard_entries()
    found: list[object] = []

    class Session:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def flush(self) -> None:
            found.append((self.error, torch.get_default_dtype()))

    sessions = [Session(None), Session(ArithmeticError("lost"))]
    monkeypatch.setattr(entries, "sessions", lambda: sessions)
    torch.set_default_dtype(other)
    monkeypatch.undo()
    torch.set_default_dtype(torch.float32)
    assert found == ([(None, torch.float32)] if other is torch.float64 else [])


def test_what_a_group_sends_is_waited_for(alone: None) -> None:
    guard_entries()
    parameter = nn.Parameter(torch.ones(4))
    waited: list[nn.Parameter] = []
    hold(parameter, lambda: waited.append(parameter))
    world: Any = dist.group.WORLD
    world.broadcast([parameter])
    assert len(waited) == 1
