"""A rank's part of a directed graph: its vertices, and whose rows it needs and gives."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytesched.errors import MismatchError, PluginError

from ..exchanges.counts import Form
from ..exchanges.peers import Peers, peers_of
from .pieces import Halo, Piece, by_rows, cut, entries

_DTYPES = (torch.float32, torch.float64)


class Partition:
    """The vertices of one rank, and the edges that end at them; collective.

    Ranks compare what they were given before anything else is sent. Then each one tells the owners
    which vertices of theirs its edges come from: its halo. That is agreed once, for all layers and
    epochs.

    Args:
        owner: the rank of every vertex of the graph, the same on all ranks.
        source: where edges come from: numbers of vertices, of the whole graph.
        target: where they end. What ends at a vertex of another rank is left out, so that a rank
            may know all edges, or its own alone.
        weight: of each edge, float32 or float64; a constant.
        group: the ranks; all of them if it is None. Without torch.distributed, one process has the
            whole graph.
        piece_bytes: a halo is cut so that no rank sends more at a time.

    Raises:
        MismatchError: on all ranks alike, if they were given different owners, dtypes or sizes of
            pieces, or if what one was given is no graph.
    """

    def __init__(
        self,
        owner: Tensor,
        source: Tensor,
        target: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        *,
        piece_bytes: int = 256 * 1024,
    ) -> None:
        self.peers = peers = peers_of(group)
        self.rank = peers.rank if peers else 0
        self.size = peers.size if peers else 1
        self.piece_bytes = piece_bytes
        self.dtype = weight.dtype
        wrong = _why_wrong(owner, source, target, weight, self.size)
        if peers is None:
            if wrong or piece_bytes < 1:
                raise PluginError(f"this is no graph to share out: {wrong or piece_bytes}")
            counts: Sequence[Sequence[int]] = [[0]]
        if not wrong:
            mine = owner[target] == self.rank
            source, target, weight = source[mine], target[mine], weight[mine]
        halo = torch.unique(source[owner[source] != self.rank]) if not wrong else source[:0]
        if peers is not None:
            need = [0] * self.size
            if not wrong:
                need = torch.bincount(owner[halo], minlength=self.size).tolist()
            counts = _agreed(peers, owner, [_number(self.dtype), piece_bytes], need, wrong)
        #: numbers of this rank's vertices among all; ``x`` has a row for each, in this order
        self.vertices = (owner == self.rank).nonzero().view(-1)
        # By distance of the owner: at any time, each rank then sends to another one.
        distance = (self.rank - owner[halo]) % self.size
        #: numbers of the vertices of others whose rows are needed, as these arrive
        self.halo = halo = halo[distance.argsort(stable=True)]
        own, outer = len(self.vertices), len(halo)
        place = owner.new_empty(len(owner))
        place[self.vertices] = torch.arange(own, device=owner.device)
        place[halo] = torch.arange(outer, device=owner.device)
        inside = owner[source] == self.rank
        rows, columns = place[target], place[source]
        inner = entries(rows[inside], columns[inside], weight[inside], (own, own))
        self.inner = by_rows(inner)
        self.inner_transposed = by_rows(inner.t().coalesce())
        self._halo = Halo(
            rank=self.rank,
            counts=counts,
            give=_asked(peers, halo, counts, place),
            matrix=entries(rows[~inside], columns[~inside], weight[~inside], (own, outer)),
        )
        self._pieces: dict[int, list[Piece]] = {}
        self._agreed_forms: set[Form] = set()

    def pieces(self, row_bytes: int) -> list[Piece]:
        """The halo, cut for rows of so many bytes; on all ranks alike."""
        most_rows = max(1, self.piece_bytes // row_bytes)
        if most_rows not in self._pieces:
            self._pieces[most_rows] = cut(self._halo, most_rows)
        return self._pieces[most_rows]

    def check(self, x: Tensor) -> None:
        """Raises MismatchError, on all ranks alike, if ``x`` does not fit here or elsewhere.

        Ranks talk only about a form that is new to them.
        """
        fits = x.dim() == 2 and len(x) == len(self.vertices) and x.dtype == self.dtype
        form = Form.of(x, piece_bytes=self.piece_bytes, wrong=not fits)
        if form in self._agreed_forms:
            return
        forms = [form]
        if self.peers is not None:
            table = self.peers.gather(form, [], x.device, is_urgent=True)
            forms = list(table.forms)
        for rank, one in enumerate(forms):
            if one.wrong:
                raise MismatchError(
                    f"rank {rank} of the graph has rows that do not fit its vertices ({one}): give "
                    "a matrix with a row for each of them, of the dtype of the edges' weights; "
                    "nothing was sent"
                )
        if self.peers is not None:
            table.check_forms()
        self._agreed_forms.add(form)

    def __deepcopy__(self, _: Any) -> Partition:
        """Itself: copies of a model share the graph, and its connections."""
        return self

    def __repr__(self) -> str:
        return (
            f"<Partition rank {self.rank} of {self.size}: {len(self.vertices)} vertices, "
            f"{len(self.halo)} in the halo>"
        )


def _why_wrong(owner: Tensor, source: Tensor, target: Tensor, weight: Tensor, size: int) -> str:
    """What is wrong with a graph, or nothing."""
    if any(one.dim() != 1 or one.dtype != torch.int64 for one in (owner, source, target)):
        return "owner, source and target must be vectors of int64"
    if weight.dtype not in _DTYPES or not source.shape == target.shape == weight.shape:
        return "source, target and weight must have one entry for each edge, weight a float"
    for name, numbers, end in (
        ("owner", owner, size),
        ("source", source, len(owner)),
        ("target", target, len(owner)),
    ):
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
            return f"{name} must be from 0 to {end - 1}"
    return ""


def _number(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else -1


def _agreed(
    peers: Peers, owner: Tensor, more: Sequence[int], need: Sequence[int], wrong: str
) -> list[list[int]]:
    """How many rows each rank needs from each, once all have the same owners; collective."""
    digest = hashlib.sha256(owner.cpu().numpy().tobytes()).digest()
    same = [len(owner), int.from_bytes(digest[:8], "little") >> 1, *more]
    told = peers.gather_numbers([int(bool(wrong)), *same, *need], owner.device, is_urgent=False)
    for rank, (is_wrong, *rest) in enumerate(told):
        if is_wrong:
            why = f": {wrong}" if rank == peers.rank else ""
            raise MismatchError(
                f"rank {rank} was given no graph to share out, see its own log{why}; "
                "nothing was sent"
            )
        if rest[: len(same)] != told[0][1 : 1 + len(same)]:
            raise MismatchError(
                f"the ranks disagree about the partition: rank 0 has {_words(told[0])}, rank "
                f"{rank} has {_words(told[rank])}: give all the same owners; nothing was sent"
            )
    return [numbers[1 + len(same) :] for numbers in told]


def _words(numbers: Sequence[int]) -> str:
    _, vertices, digest, dtype, piece_bytes, *_ = numbers
    return (
        f"{vertices} vertices with owners {digest:016x}, {_DTYPES[dtype]}, "
        f"pieces of {piece_bytes} bytes"
    )


def _asked(
    peers: Peers | None, halo: Tensor, counts: Sequence[Sequence[int]], place: Tensor
) -> list[Tensor]:
    """By rank, the places of own rows that it needs; collective."""
    if peers is None:
        return [place[:0]]
    # Exchanges are by rank, this halo by distance.
    mine, size = peers.rank, peers.size
    parts = halo.split([counts[mine][(mine - distance) % size] for distance in range(size)])
    by_rank = torch.cat([parts[(mine - rank) % size] for rank in range(size)])
    receive = [counts[rank][mine] for rank in range(size)]
    asked = peers.start(
        by_rank.unsqueeze(1), list(counts[mine]), receive, "graph halo", is_urgent=False
    ).wait()
    return [place[numbers.view(-1)] for numbers in asked.split(receive)]
