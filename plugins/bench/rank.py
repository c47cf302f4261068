"""What every rank of a measurement does around it, and what ranks tell each other."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from bytesched.errors import PluginError
from bytesched.lab.ranks import Place
from bytesched.records import from_json

SpecT = TypeVar("SpecT")


class Ranks:
    """All ranks of a measurement, seen from this one; what it does is collective, except `say`."""

    def __init__(self) -> None:
        # What ranks tell each other leaves a GPU alone.
        self._group: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        """All ranks are here."""
        dist.barrier(self._group)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def mean(self, value: float) -> float:
        """The mean over all ranks, the same number on each."""
        return statistics.fmean(self.gather(value))

    def means(self, values: list[float]) -> list[float]:
        """The same of each of several numbers."""
        return [statistics.fmean(each) for each in zip(*self.gather(values), strict=True)]

    def say(self, line: str) -> None:
        """Progress, from rank 0."""
        if self.rank == 0:
            print(line, flush=True)


def run_rank(
    kind: type[SpecT],
    measure: Callable[[SpecT, Place], dict[str, Any]],
    prepare: Callable[[SpecT, Place], str] = lambda *_: "gloo",
) -> NoReturn:
    """One rank, ``python -m WORKER SPECIFICATION PLACE``; rank 0 writes the result.

    ``prepare`` comes before anything else, and names the backend.
    """

    def main(argv: list[str]) -> int:
        spec, place = from_json(kind, argv[0]), from_json(Place, argv[1])
        timeout = timedelta(seconds=spec.timeout_s)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(prepare(spec, place), timeout=timeout)
            result = measure(spec, place)
        except PluginError as error:
            # What failed in another process has printed where.
            print(error, file=sys.stderr, flush=True)
            return 1
        if place.rank == 0:
            Path(place.result).write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        return 0

    leave_after(main)


def leave_after(main: Callable[[list[str]], int]) -> NoReturn:
    """Run ``main`` on the command line's arguments and end with what it returns, or with 1.

    A thread of Gloo's that lets go of an operation started in a backward pass needs the
    interpreter's lock (torch 2.13). In a process that ends in the ordinary way it now and then
    finds none, and aborts it.
    """
    try:
        exit_code = main(sys.argv[1:])
    except Exception:  # noqa: BLE001 - it is printed as the interpreter would
        sys.excepthook(*sys.exc_info())
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
