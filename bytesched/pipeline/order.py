"""An order: which rank works on which micro-batch of which stage, one after the other.

Its file is that of ``torch.distributed.pipelining`` ("compute_only"): a row for each rank, a cell
for each slot, such as ``2I1`` (stage 2, input gradient, micro-batch 1); an empty cell is idle.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from bytesched.errors import ConfigError
from bytesched.files import read_text, write_text
from bytesched.values import shown

_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
#: what torch writes as well
_ADDED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*", flags=re.ASCII)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_BYTE_ORDER_MARK = "\ufeff"


class Kind(Enum):
    """What is computed: by the letter that stands for it in a cell."""

    FORWARD = "F"
    BACKWARD = "B"
    #: the first half of a backward: the gradient of the stage's input, which the stage before needs
    INPUT_GRADIENT = "I"
    #: the second half: the gradients of the stage's weights, which nobody waits for
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One micro-batch in one stage."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Row = tuple[Action | None, ...]


def needs(action: Action, stages: int, actions: Collection[Action]) -> tuple[Action, ...]:
    """What has to be over before ``action`` starts, of what is in ``actions``.

    Args:
        stages: how many there are; the last one's backward begins with its own forward.
    """
    stage, kind, micro_batch = action
    if kind is Kind.WEIGHT_GRADIENT:
        return (Action(stage, Kind.INPUT_GRADIENT, micro_batch),)
    if kind is Kind.FORWARD:
        return (Action(stage - 1, Kind.FORWARD, micro_batch),) if stage else ()
    own = Action(stage, Kind.FORWARD, micro_batch)
    if stage == stages - 1:
        return (own,)
    later = Action(stage + 1, Kind.BACKWARD, micro_batch)
    if later not in actions:
        later = Action(stage + 1, Kind.INPUT_GRADIENT, micro_batch)
    return own, later


def in_turn(
    rows: Sequence[Sequence[Action | None]], stages: int
) -> Iterator[tuple[Action, tuple[Action, ...]]]:
    """Every action after what it needs and what its row has before it, with what it needs.

    As far as ranks can follow their rows: what waits for what never comes is left out.
    """
    left = [[action for action in row if action is not None][::-1] for row in rows]
    everything = {action for row in left for action in row}
    over: set[Action] = set()
    before = -1
    while len(over) > before:
        before = len(over)
        for row in left:
            while row:
                needed = needs(row[-1], stages, everything)
                if not over.issuperset(needed):
                    break
                over.add(row[-1])
                yield row.pop(), needed


@dataclass(frozen=True)
class Order:
    """Rows of actions, one for each rank; ``None`` is an idle slot.

    Every stage stands on one rank, every micro-batch passes every stage once forward and once
    backward (as ``B``, or as ``I`` and later ``W``), and ranks that follow their rows never wait
    for each other in a circle: a ``ConfigError`` names ``origin``, row and cell otherwise.
    """

    rows: tuple[Row, ...]
    origin: str = field(default="order", compare=False)
    #: the rank of each stage
    stage_ranks: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage_ranks", tuple(self._stage_ranks()))
        self._check_counts()
        self._check_progress()

    @classmethod
    def read(cls, path: str | Path) -> Order:
        """The order in a file. Raises ``ConfigError`` that names file, row and cell."""
        origin = f"order {path}"
        try:
            text = read_text(Path(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{origin}: {getattr(error, 'strerror', None) or error}") from None
        return cls.parse(text, origin)

    @classmethod
    def parse(cls, text: str, origin: str = "order") -> Order:
        """The order that CSV describes; ``origin`` is where it came from, for errors."""
        try:
            marked = io.StringIO(text.removeprefix(_BYTE_ORDER_MARK), newline="")
            table = list(csv.reader(marked, strict=True))
        except csv.Error as error:
            raise ConfigError(f"{origin} is not valid CSV: {error}") from None
        while table and not table[-1]:
            # Editors leave blank lines behind; a rank without work is a line of commas.
            table.pop()
        rows = tuple(
            tuple(
                _action(cell, f"{origin}, row {row}, cell {column}")
                for column, cell in enumerate(cells, 1)
            )
            for row, cells in enumerate(table, 1)
        )
        return cls(rows, origin)

    def to_csv(self) -> str:
        """The content of its file."""
        lines = (
            ",".join("" if action is None else str(action) for action in row) for row in self.rows
        )
        return "".join(f"{line}\n" for line in lines)

    def write(self, path: str | Path) -> None:
        """Write its file, in one piece. Raises ``OSError`` if it cannot be written."""
        write_text(Path(path), self.to_csv())

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches an iteration has."""
        return 1 + max(action.micro_batch for action in self.actions())

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is cut into ``I`` and ``W``."""
        return any(action.kind is Kind.WEIGHT_GRADIENT for action in self.actions())

    def actions(self) -> Iterator[Action]:
        """All actions, rank by rank."""
        return (action for row in self.rows for action in row if action is not None)

    def __str__(self) -> str:
        return self.to_csv()

    def _cells(self) -> Iterator[tuple[str, int, Action]]:
        """Every action with its place, for messages, and its rank."""
        for rank, row in enumerate(self.rows):
            for column, action in enumerate(row, 1):
                if action is not None:
                    yield f"row {rank + 1}, cell {column}", rank, action

    def _stage_ranks(self) -> Iterator[int]:
        for rank, row in enumerate(self.rows):
            if not any(row):
                raise ConfigError(
                    f"{self.origin}, row {rank + 1}: rank {rank} has nothing to do; every rank "
                    "needs a stage"
                )
        ranks: dict[int, int] = {}
        for here, rank, action in self._cells():
            first = ranks.setdefault(action.stage, rank)
            if first != rank:
                raise ConfigError(
                    f"{self.origin}, {here}: {action} puts stage {action.stage} on rank {rank}, "
                    f"but it is on rank {first}; torch keeps a stage on one rank"
                )
        if not ranks:
            raise ConfigError(f"{self.origin} is empty: expected a row for each rank")
        for stage in range(len(ranks)):
            if stage not in ranks:
                raise ConfigError(
                    f"{self.origin}: there is a stage {max(ranks)}, but no stage {stage}; stages "
                    "are numbered from 0"
                )
            yield ranks[stage]

    def _check_counts(self) -> None:
        where: dict[Action, str] = {}
        for here, _, action in self._cells():
            if action in where:
                raise ConfigError(
                    f"{self.origin}, {here}: {action} is there again, after {where[action]}"
                )
            where[action] = here
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches):
                found = "".join(
                    kind.value for kind in Kind if Action(stage, kind, micro_batch) in where
                )
                if found not in ("FB", "FIW"):
                    raise ConfigError(
                        f"{self.origin}: stage {stage} has {' and '.join(found) or 'nothing'} of "
                        f"micro-batch {micro_batch}, expected F and B, or F, I and W"
                    )

    def _check_progress(self) -> None:
        """Follow all rows as far as they go."""
        over = {action for action, _ in in_turn(self.rows, self.stages)}
        everything = set(self.actions())
        for here, rank, action in self._cells():
            if action in over:
                continue
            missing = [need for need in needs(action, self.stages, everything) if need not in over]
            own = [
                f"{need} stands behind it in the same row"
                for need in missing
                if need in self.rows[rank]
            ]
            raise ConfigError(
                f"{self.origin}, {here}: {action} waits for {' and '.join(map(str, missing))}, "
                f"which never comes: {[*own, 'ranks wait for each other in a circle'][0]}"
            )


def _action(cell: str, where: str) -> Action | None:
    text = cell.strip()
    if not text:
        return None
    if match := _CELL.fullmatch(text):
        return Action(int(match[1]), Kind(match[2]), int(match[3]))
    if _ADDED.fullmatch(text):
        why = (
            "not computed, but of torch's format compute_comms: write the file with "
            "schedule._dump_csv(path, format='compute_only'), or leave such cells out (torch adds "
            "them itself)"
        )
    elif overlapped := _OVERLAPPED.fullmatch(text):
        why = (
            "two actions that torch overlaps: write them as cells of their own, one after the "
            f"other: {','.join(overlapped[1].split(';'))}"
        )
    else:
        why = (
            "no action; expected a stage, F, B, I or W, and a micro-batch, such as 2I1, or "
            "nothing (torch's format compute_only)"
        )
    raise ConfigError(f"{where}: {shown(text)} is {why}")
