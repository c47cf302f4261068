"""The layer: tokens go to their experts and come back, in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.errors import PluginError

from .counts import Call, Form, Training
from .gates import DTSGate, Routing, TopKGate
from .peers import new_layer, peers_of
from .pieces import cut, number_of_pieces
from .round import Round, applied

__all__ = ["MoE"]


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
            matrix, one row a token, to another one of that shape; results are taken in the dtype
            of the tokens.
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
        #: tells the layers over one group apart
        self._number = new_layer(group)
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
                dist.broadcast(tensor.detach(), src=root, group=data_parallel_group)
        # Public under other names since torch 2.5.
        self._register_state_dict_hook(_number_among_all)  # type: ignore[no-untyped-call]
        self._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _number_among_own, with_module=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``, whose last dimension is a token's width."""
        tokens = x.flatten(0, -2)
        routing: Routing = self.gate(tokens)
        self.auxiliary_loss = routing.auxiliary_loss
        # By expert, and so by the rank that holds it; then by token.
        expert, token = routing.keep.t().nonzero(as_tuple=True)
        self.kept = len(token) / max(len(tokens), 1)
        rows = self._computed(tokens[token], routing.keep.sum(dim=0).tolist())
        # A router may compute in a wider type than tokens have.
        weighted = (rows * routing.weight[token, expert].unsqueeze(1)).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(x)

    def _computed(self, rows: Tensor, counts: list[int]) -> Tensor:
        """What experts make of ``rows``, which are sorted by expert: ``counts`` for each."""
        peers = peers_of(self.group)
        if (peers.size if peers else 1) != self._ranks:
            raise PluginError(
                f"the layer was made for {self._ranks} ranks: make it after init_process_group, "
                "and call it before destroy_process_group"
            )
        if peers is None:
            self.pieces = 1
            return applied(self.experts, list(rows.split(counts)))
        form = Form.of(
            rows,
            Call.LAYER,
            layer=self._number,
            most_pieces=self.most_pieces,
            piece_bytes=self.piece_bytes,
            training=self._training(),
        )
        table = peers.gather(form, counts, rows.device, is_urgent=self.is_urgent)
        table.check_forms()
        row_bytes = rows.shape[1] * rows.element_size()
        pieces = cut(
            len(self.experts),
            number_of_pieces(
                [row_bytes * sum(sent) for sent in table.counts], self.piece_bytes, self.most_pieces
            ),
        )
        self.pieces = len(pieces)
        return Round(peers, self.experts, table, pieces, self.is_urgent).run(rows)

    def _training(self) -> Training:
        if not torch.is_grad_enabled():
            return Training.UNRECORDED
        is_trained = any(parameter.requires_grad for parameter in self.experts.parameters())
        return Training.TRAINED if is_trained else Training.FROZEN


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
