"""All-to-alls of a script that nobody has touched: sections from their call to their end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bytesched.run.urgent_calls import mark_all_to_alls
from bytesched.urgency import URGENCY


class Work:
    def __init__(self) -> None:
        self.ends: list[Callable[[Any], None]] = []

    def get_future(self) -> Work:
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.ends.append(callback)


def sections() -> int:
    return len(URGENCY._sections)


def marked(function: Callable[..., Any]) -> Any:
    module = SimpleNamespace(all_to_all_single=function, all_to_all=function)
    mark_all_to_alls(module)
    return module


def test_one_that_waits_is_urgent_until_it_returns() -> None:
    def all_to_all_single(*args: Any) -> None:
        assert args == (1, 2)
        assert sections() == 1

    module = marked(all_to_all_single)
    assert module.all_to_all_single(1, 2) is None
    assert sections() == 0
    assert module.all_to_all_single.__name__ == "all_to_all_single"


def test_one_that_raises_ends() -> None:
    def all_to_all(*args: Any) -> None:
        raise ValueError("sizes")

    with pytest.raises(ValueError, match="sizes"):
        marked(all_to_all).all_to_all()
    assert sections() == 0


def test_an_asynchronous_one_is_urgent_until_its_work_ends() -> None:
    work = Work()
    assert marked(lambda: work).all_to_all() is work
    assert sections() == 1
    work.ends[0](work)
    assert sections() == 0
