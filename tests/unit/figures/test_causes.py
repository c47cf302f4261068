"""Which line of a script reads gradients in front of step()."""

from __future__ import annotations

import linecache
import sys

import torch
from torch import nn

from bytesched.plugins.figures import causes as module
from bytesched.plugins.figures.causes import Causes, place


class Grad(torch.Tensor):
    """A gradient that notes who reads it."""

    causes: Causes

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.causes.read(f"p{next(_numbers)}", waited_ns=1000)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_numbers = iter(range(10**6))


def parameters(count: int) -> list[nn.Parameter]:
    Grad.causes = Causes(count)
    found = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    for parameter in found:
        parameter.grad = torch.ones(2).as_subclass(Grad)
    return found


def line() -> int:
    """That of the caller."""
    return sys._getframe(1).f_lineno


def test_a_function_of_torch_is_named_with_the_line_that_calls_it() -> None:
    nn.utils.clip_grad_norm_(parameters(3), 1.0)
    here = line() - 1
    worst = Grad.causes.worst
    assert worst == f"clip_grad_norm_ reads all gradients (test_causes.py:{here})"
    assert "clip_grad_norm_" in linecache.getline(__file__, here)


def test_what_is_read_seldom_is_named() -> None:
    causes = Causes(5)
    causes.read("weight", waited_ns=10)
    here = line() - 1
    assert causes.worst == f"the script reads weight.grad (test_causes.py:{here})"
    assert place() == ("", f"test_causes.py:{line()}")


def test_norms_that_are_asked_for_are_named_so() -> None:
    causes = Causes(5)
    causes.asked(waited_ns=10)
    here = line() - 1
    expected = f"the script asks for norms of all gradients (test_causes.py:{here})"
    assert causes.worst == expected


def test_what_was_there_already_is_no_reason() -> None:
    causes = Causes(1)
    causes.read("weight", waited_ns=0)
    assert causes.worst == ""


def test_stacks_are_looked_at_for_a_limited_time() -> None:
    causes = Causes(1)
    causes._spent_ns = module._BUDGET_NS + 1
    causes.read("weight", waited_ns=10)
    assert causes.worst == ""
