"""How ranks come to split their all-reduces together, and what becomes of a vote that fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import bytesched.plugins.queries.splitting as module
from bytesched.errors import PeerLost
from bytesched.plugins.queries.operations import NORMS
from bytesched.plugins.queries.splitting import Splitting
from bytesched.plugins.routes.carrier import Traffic
from bytesched.plugins.routes.streams import Streams
from bytesched.round import GradientState
from bytesched.tunable import Setting

SLOT_BYTES = 400


def nothing(*_: object) -> None:
    """What is done elsewhere."""


class Ranks:
    """All but this one ask for norms; or they are gone."""

    rank, size = 0, 2

    def __init__(self, *, are_gone: bool = False) -> None:
        self.are_gone = are_gone
        self.sums: list[str] = []

    def sum(self, tensor: torch.Tensor, key: str) -> object:
        self.sums.append(key)
        tensor += 1
        return key

    def wait(self, work: object, *, task: str = "") -> None:
        if self.are_gone:
            raise PeerLost("rank 1 is gone", peers=[1])


class Whole(str):
    """Carries the other rounds."""

    __slots__ = ()
    story = str


@dataclass(eq=False)
class FakeSlot:
    use_queries: Any
    state: GradientState = GradientState.TRAVELLING
    view: torch.Tensor = field(default_factory=lambda: torch.zeros(SLOT_BYTES // 4))


class Split:
    """Carries split rounds, in each of which the script asks for all norms."""

    queries, story, lost = None, str, None

    def __init__(self, progress: Any) -> None:
        self.traffic = Traffic()
        self.progress = progress

    @property
    def asked(self) -> Any:
        late_share = self.progress.outstanding_bytes / SLOT_BYTES
        return SimpleNamespace(are_most=True, late_share=late_share)

    begin_round = backward_ends = end_round = close = nothing

    def __repr__(self) -> str:
        return "split"


def splitting(ranks: Ranks, failed: list[BaseException]) -> tuple[Splitting, Any]:
    handlers: list[Any] = []
    slot: Any = FakeSlot(handlers.append)
    synchronizing = SimpleNamespace(wait_reduced=nothing, synchronize_all=nothing)
    parts: Any = SimpleNamespace(
        plan=SimpleNamespace(slots=[slot], chunks=[]),
        carrier=Whole("whole"),
        packer=None,
        synchronizing=synchronizing,
        plan_cut=nothing,
        cut_whole=nothing,
    )

    def raise_first(error: BaseException) -> NoReturn:
        failed.append(error)
        raise error

    progress = SimpleNamespace(raise_first=raise_first, outstanding_bytes=0)
    context: Any = SimpleNamespace(
        backend=ranks,
        progress=progress,
        meter=SimpleNamespace(changed=nothing),
        observers=None,
        streams=Streams(),
    )
    splitter: Any = SimpleNamespace(cut=nothing, carrier=lambda *_, **__: Split(progress))
    setting = Setting(partition_bytes=16, credit_bytes=16)
    made = Splitting(
        splitter, parts, context, setting, mode="auto", is_tuned=False, reduced=lambda _: None
    )
    return made, SimpleNamespace(ask=handlers[0], slot=slot, progress=progress)


def test_a_vote_that_fails_ends_the_session_so_that_others_learn_of_it() -> None:
    failed: list[BaseException] = []
    voting, _ = splitting(Ranks(are_gone=True), failed)
    voting.carrier()
    voting.begin_round()
    with pytest.raises(PeerLost) as raised:
        voting.carrier()
    assert failed == [raised.value]


def test_whoever_never_asks_for_norms_votes_for_whole_ones() -> None:
    ranks = Ranks()
    failed: list[BaseException] = []
    voting, script = splitting(ranks, failed)
    for _ in range(9):
        assert str(voting.carrier()) == "whole"
        voting.begin_round()
        assert script.ask(torch.Tensor.add, (), {}) is NotImplemented
    assert ranks.sums == ["split or whole"] * 4
    assert torch.Tensor.norm in NORMS
    assert not failed


def test_all_reduces_are_split_while_scripts_wait_for_late_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, failed = Ranks(), list[BaseException]()
    voting, script = splitting(ranks, failed)
    monkeypatch.setattr(module, "slots_in", lambda _: [script.slot])
    late = [*(0,) * 20, *(SLOT_BYTES // 2,) * 30, *(SLOT_BYTES // 10,) * 500]
    carried = []
    for late_bytes in late:
        carried.append(str(voting.carrier()))
        voting.begin_round()
        voting.backward_ends()
        script.progress.outstanding_bytes = late_bytes
        script.ask(torch.Tensor.norm, ([torch.zeros(1)],), {})
        voting.end_round()
    changes = [
        number for number in range(1, len(carried)) if carried[number] != carried[number - 1]
    ]
    # The votes of rounds 2, 16 and 32 (eleven of the sixteen before it were late) count from the
    # next round on; later a tenth is late, which is enough to go on.
    assert changes == [2, 16, 32]
    assert carried[2] == carried[32] == carried[-1] == "split"
    assert not failed
