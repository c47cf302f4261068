"""A suite for stores: what every `KVStore` must pass, ours or another.

Inherit it in a test module and supply its factories; pytest and unittest find the ``test_``
methods. Where there is no test runner, as inside a rank, `Contract.run_all` calls them.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import closing
from typing import Any

from bytesched.errors import InvalidTransition, MismatchError, SchedulerClosed
from bytesched.kvstore.protocol import Key, KVStore

__all__ = ["KVStoreContract"]

_SIZE = 7


class Contract:
    """A class of ``test_`` methods, each on its own."""

    def run_all(self) -> list[str]:
        """Calls every ``test_`` method, in order of name, and returns the names."""
        names = sorted(name for name in dir(self) if name.startswith("test_"))
        for name in names:
            getattr(self, name)()
        return names


class KVStoreContract(Contract):
    """What the `KVStore` protocol promises. Every worker runs every test, in one order.

    Supply `store`, `array` and `numbers`; a store whose ``pull`` returns before ``out`` is filled
    also supplies `wait`.
    """

    @abstractmethod
    def store(self) -> KVStore:
        """This worker's view of a new store; all workers call it together."""

    @abstractmethod
    def array(self, numbers: list[float]) -> Any:
        """A new one-dimensional float32 array of the kind that the store takes."""

    @abstractmethod
    def numbers(self, array: Any) -> list[float]:
        """The elements of such an array."""

    def wait(self, kv: KVStore, key: Key) -> None:
        """Returns when the last pull of ``key`` has filled its array."""

    def test_init_takes_the_value_of_worker_0(self) -> None:
        with closing(self.store()) as kv:
            for key in ("weight", 3):
                kv.init(key, self._array(kv.rank + 1))
                assert self._pulled(kv, key) == [1.0] * _SIZE

    def test_a_step_is_the_sum_over_workers(self) -> None:
        with closing(self.store()) as kv:
            keys: list[Key] = ["a", "b", 7]
            for key in keys:
                kv.init(key, self._array(0))
            for step in range(4):
                for index, key in enumerate(keys):
                    kv.push(key, self._array(kv.rank + 10 * index + step))
                workers = kv.num_workers
                for index, key in enumerate(keys):
                    total = sum(range(workers)) + workers * (10 * index + step)
                    assert self._pulled(kv, key) == [total] * _SIZE, (key, step)

    def test_pushpull_fills_the_value_or_out(self) -> None:
        with closing(self.store()) as kv:
            kv.init("a", self._array(0))
            value, out = self._array(2), self._array(-1)
            kv.pushpull("a", value, out)
            self.wait(kv, "a")
            assert self.numbers(out) == [2.0 * kv.num_workers] * _SIZE
            assert self.numbers(value) == [2.0] * _SIZE
            kv.pushpull("a", value)
            self.wait(kv, "a")
            assert self.numbers(value) == [2.0 * kv.num_workers] * _SIZE

    def test_a_pushed_value_may_be_overwritten(self) -> None:
        with closing(self.store()) as kv:
            kv.init("a", self._array(0))
            value = self._array(1)
            kv.push("a", value)
            value[...] = self._array(99)
            assert self._pulled(kv, "a") == [float(kv.num_workers)] * _SIZE

    def test_a_pull_changes_nothing(self) -> None:
        with closing(self.store()) as kv:
            kv.init("a", self._array(5))
            kv.push("a", self._array(1))
            for _ in range(3):
                assert self._pulled(kv, "a") == [float(kv.num_workers)] * _SIZE

    def test_misuse_is_named_and_leaves_the_store_working(self) -> None:
        with closing(self.store()) as kv:
            _raises(InvalidTransition, kv.push, "nobody", self._array(1))
            _raises(InvalidTransition, kv.pull, "nobody", self._array(1))
            kv.init("a", self._array(0))
            _raises(InvalidTransition, kv.init, "a", self._array(0))
            _raises(MismatchError, kv.push, "a", self.array([1.0]))
            _raises(MismatchError, kv.pull, "a", self.array([1.0]))
            kv.push("a", self._array(1))
            _raises(InvalidTransition, kv.push, "a", self._array(1))
            assert self._pulled(kv, "a") == [float(kv.num_workers)] * _SIZE

    def test_workers_that_disagree_are_told(self) -> None:
        with closing(self.store()) as kv:
            if kv.num_workers > 1:
                size = _SIZE if kv.rank == 0 else _SIZE + 1
                _raises(MismatchError, kv.init, "a", self.array([1.0] * size))

    def test_a_barrier_lets_all_workers_pass(self) -> None:
        with closing(self.store()) as kv:
            for _ in range(3):
                kv.barrier()

    def test_nothing_goes_after_close(self) -> None:
        kv = self.store()
        kv.init("a", self._array(0))
        kv.close()
        kv.close()
        _raises(SchedulerClosed, kv.push, "a", self._array(1))
        _raises(SchedulerClosed, kv.pull, "a", self._array(1))

    def _array(self, number: float) -> Any:
        return self.array([float(number)] * _SIZE)

    def _pulled(self, kv: KVStore, key: Key) -> list[float]:
        out = self._array(-1)
        kv.pull(key, out)
        self.wait(kv, key)
        return self.numbers(out)


def _raises(kind: type[Exception], call: Any, *args: Any) -> None:
    try:
        call(*args)
    except kind:
        return
    raise AssertionError(f"{call.__name__}({args[0]!r}) raised no {kind.__name__}")
