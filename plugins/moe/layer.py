"""The layer: tokens go to their experts and come back, in pieces."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.errors import ConfigError, PluginError

from ..exchanges.counts import Form, Table
from ..exchanges.peers import Peers, peers_of
from .exchange import Exchange, Piece, begin, cut, finish, number_of_pieces
from .gates import DTSGate, Routing, TopKGate


class MoE(nn.Module):
    """A layer of experts that the ranks of a group share out, with the results of one process.

    The sum over the experts that ``gate`` keeps for a token, each times its weight. Only what the
    gate keeps is sent, and in pieces: experts compute on one while the next is on its way. Every
    rank calls the layer equally often, in the same order as the others, also if it has no tokens;
    each expert is always called, so that all parameters have gradients. After a call,
    ``auxiliary_loss`` is the gate's, ``kept`` the experts per token, and ``pieces`` how many were
    sent; of this rank.

    In ``state_dict()`` experts have their numbers among all, so the dictionaries of all ranks
    differ and fit together: see `full_state_dict`. Loading takes what belongs to this rank, from
    its own dictionary or a full one.

    The experts' parameters are kept equal in ``data_parallel_group`` and nowhere else:
    `data_parallel` keeps DistributedDataParallel away from them.

    Args:
        gate: gives a `Routing` over all experts; a `TopKGate` or a `DTSGate`.
        experts: this rank's, of which every rank has as many; see `own_experts`. Each maps a
            matrix, one row a token, to another one of that shape.
        group: the ranks that share out the experts; all of them if it is None. Without
            torch.distributed, one process holds all experts.
        data_parallel_group: the ranks that hold the same experts; the first one's weights are
            taken. None where no other rank does.
        most_pieces: a dispatch is cut into at most so many pieces.
        piece_bytes: and into no more than one for so many bytes of the busiest rank.
        is_urgent: False lets exchanges and gradients share the link, to compare.
    """

    auxiliary_loss: Tensor
    kept: float
    pieces: int

    def __init__(
        self,
        gate: TopKGate | DTSGate,
        experts: Iterable[nn.Module],
        group: dist.ProcessGroup | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        *,
        most_pieces: int = 4,
        piece_bytes: int = 256 * 1024,
        is_urgent: bool = True,
    ) -> None:
        super().__init__()
        if most_pieces < 1 or piece_bytes < 1:
            raise ConfigError(
                f"most_pieces = {most_pieces} and piece_bytes = {piece_bytes}: at least 1 of each"
            )
        self.gate = gate
        self.experts = nn.ModuleList(experts)
        # Of the experts alone: the gate is the same on all ranks, and reduced over all.
        self.experts.data_parallel_group = data_parallel_group  # type: ignore[assignment]
        self.group = group
        self.most_pieces = most_pieces
        self.piece_bytes = piece_bytes
        self.is_urgent = is_urgent
        peers = peers_of(group)
        own = len(self.experts)
        self._ranks = peers.size if peers else 1
        #: among the layers of these ranks
        self.number = peers.register(gate.experts, "the gate's experts") if peers else 0
        if own * self._ranks != gate.experts or not own:
            raise PluginError(
                f"the gate knows {gate.experts} experts, but this rank has {own} and is one of "
                f"{self._ranks} that share them out: give each rank as many, see own_experts()"
            )
        first = own * (peers.rank if peers else 0)
        #: the numbers of this rank's experts among all
        self.numbers = range(first, first + own)
        if data_parallel_group is not None:
            for tensor in [*self.experts.parameters(), *self.experts.buffers()]:
                root = dist.get_global_rank(data_parallel_group, 0)
                # Gloo takes no heed of strides.
                values = tensor.detach().contiguous()
                dist.broadcast(values, src=root, group=data_parallel_group)
                with torch.no_grad():
                    tensor.copy_(values)
        # Public under other names since torch 2.5.
        self._register_state_dict_hook(_number_among_all)  # type: ignore[no-untyped-call]
        self._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _number_among_own, with_module=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``, whose last dimension is a token's width."""
        tokens = x.flatten(0, -2)
        routing = self._routed(tokens)
        self.auxiliary_loss = routing.auxiliary_loss
        # By expert, and so by the rank that holds it; then by token.
        expert, token = routing.keep.t().nonzero(as_tuple=True)
        self.kept = len(token) / max(len(tokens), 1)
        rows = self._computed(tokens[token], routing.keep.sum(dim=0).tolist())
        weighted = (rows * routing.weight[token, expert].unsqueeze(1)).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A copy over the same ranks."""
        for group in (self.group, self.experts.data_parallel_group):
            memo[id(group)] = group
        attributes = dict(self.__dict__)
        if "auxiliary_loss" in attributes:
            attributes["auxiliary_loss"] = self.auxiliary_loss.detach()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(attributes, memo))
        return copied

    # Compiled code would not catch what a gate raises; the gate itself may be compiled.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def _routed(self, tokens: Tensor) -> Routing:
        """What the gate says; the other ranks wait for it."""
        peers = self._peers()
        with peers.telling(f"the gate of layer {self.number}") if peers else nullcontext():
            routing: Routing = self.gate(tokens)
        return routing

    def _peers(self) -> Peers | None:
        peers = peers_of(self.group)
        if (peers.size if peers else 1) != self._ranks:
            raise PluginError(
                f"the layer was made for {self._ranks} ranks: make it after init_process_group, "
                "and call it before destroy_process_group"
            )
        return peers

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _computed(self, rows: Tensor, counts: list[int]) -> Tensor:
        """What experts make of ``rows``, which are sorted by expert: ``counts`` for each."""
        peers = self._peers()
        if peers is None:
            self.pieces = 1
            return _apply(self.experts, list(rows.split(counts))).to(rows.dtype)
        own = len(self.experts)
        form = Form.of(
            rows,
            self.most_pieces,
            self.piece_bytes,
            layer=self.number,
            trains=any(parameter.requires_grad for parameter in self.experts.parameters()),
        )
        table = peers.gather(form, counts, rows.device, is_urgent=self.is_urgent)
        table.check_forms()
        row_bytes = rows.shape[1] * rows.element_size()
        sent_bytes = [row_bytes * sum(sent) for sent in table.counts]
        pieces = cut(own, number_of_pieces(sent_bytes, self.piece_bytes, self.most_pieces))
        self.pieces = len(pieces)
        with peers.telling(f"experts of layer {self.number}"):
            return _in_pieces(self, peers, rows, table, pieces)


def _in_pieces(
    layer: MoE, peers: Peers, rows: Tensor, table: Table, pieces: Sequence[Piece]
) -> Tensor:
    """What all ranks' experts make of ``rows``; the table's counts are by rank and expert."""
    experts, own, counts, mine = layer.experts, len(layer.experts), table.counts, peers.rank

    def sizes(piece: Piece, sender: int, receiver: int) -> list[int]:
        """How many rows of a piece one rank has for each expert of another."""
        return [len(piece.of(counts[sender][n])) for n in piece.numbers(receiver, own)]

    offsets = [0, *accumulate(counts[mine])]
    places: list[Tensor] = []
    dispatches: list[tuple[Tensor, Exchange]] = []
    for piece in pieces:
        place = [
            torch.arange(offsets[number] + of.start, offsets[number] + of.stop)
            for rank in range(peers.size)
            for number in piece.numbers(rank, own)
            for of in [piece.of(counts[mine][number])]
        ]
        send = [sum(sizes(piece, mine, rank)) for rank in range(peers.size)]
        receive = [sum(sizes(piece, rank, mine)) for rank in range(peers.size)]
        places.append(torch.cat(place).to(rows.device))
        one = Exchange(peers, send, receive, "moe dispatch", layer.is_urgent)
        dispatches.append((begin(rows[places[-1]], one), one))
    returns: list[tuple[Tensor, Exchange]] = []
    for piece, (arriving, one) in zip(pieces, dispatches, strict=True):
        arrived = finish(arriving, one)
        lengths = [n for rank in range(peers.size) for n in sizes(piece, rank, mine)]
        parts = arrived.split(lengths)
        each = len(piece.experts)
        # From order by rank to order by expert, and back.
        by_expert = [torch.cat(parts[index::each]) for index in range(each)]
        computed = _apply([experts[index] for index in piece.experts], by_expert)
        back = computed.split([n for index in range(each) for n in lengths[index::each]])
        ordered = [
            back[index * peers.size + rank] for rank in range(peers.size) for index in range(each)
        ]
        # The form that ranks have compared, whatever autocast has made of it here.
        computed = torch.cat(ordered).to(rows.dtype)
        if computed.shape != arrived.shape:
            raise PluginError(
                f"experts of layer {layer.number} made {tuple(computed.shape)} of "
                f"{tuple(arrived.shape)}: each maps rows to as many of the same width (rank "
                f"{peers.rank} of the exchange)"
            )
        if table.trains and not computed.requires_grad:
            # Ranks whose experts train send gradients back to those whose are frozen.
            computed.requires_grad_()
        home = Exchange(peers, one.receive, one.send, "moe return", layer.is_urgent)
        returns.append((begin(computed, home), home))
    arrived_home = torch.cat([finish(coming, home) for coming, home in returns])
    # Every row is in one place of one piece.
    return arrived_home[torch.cat(places).argsort()]


def _apply(experts: Iterable[nn.Module], parts: Sequence[Tensor]) -> Tensor:
    """What each expert makes of its part, one after the other."""
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


def _number_among_all(
    module: MoE, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Names of the layer's own numbering become those of all ranks."""
    start = f"{prefix}experts."
    own = {name: state.pop(name) for name in list(state) if name.startswith(start)}
    for name, value in own.items():
        index, _, rest = name.removeprefix(start).partition(".")
        state[f"{start}{module.numbers[int(index)]}.{rest}"] = value


def _number_among_own(module: MoE, state: dict[str, Any], prefix: str, *_more: Any) -> None:
    """The reverse, without what other ranks hold."""
    start = f"{prefix}experts."
    given = {name: state.pop(name) for name in list(state) if name.startswith(start)}
    for name, value in given.items():
        number, _, rest = name.removeprefix(start).partition(".")
        if int(number) in module.numbers:
            state[f"{start}{module.numbers.index(int(number))}.{rest}"] = value
