"""The gradients of the layers on one set of ranks: a session of the core's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from bytesched.burst.cost import Place
from bytesched.config import Config
from bytesched.errors import PluginError, TransportError
from bytesched.observe import Observer, Observers

from ..agree import statements
from ..c10d.joining import BUCKET_BYTES, Joining
from ..planned.beginning import add_optimizer, why_whole
from ..planned.bundles import Slot
from ..planned.hooked_session import HookedSession
from ..planned.terms import Terms, setting_of
from ..planned.wire import GroupWire
from ..routes.group import Group
from ..routes.opening import open_gloo
from ..routes.store import await_keys


class GuardedStore(distributed_c10d.Store):
    """A store by which some ranks connect, which ends with the error that ``lost`` returns.

    Gloo waits in it for the address of every other rank, and cannot be interrupted.
    """

    def __init__(
        self,
        store: distributed_c10d.Store,
        lost: Callable[[], TransportError | None],
        *,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._store = store
        self._lost = lost
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all of them were set; raises the error of ``lost``, or the store's own."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        await_keys(self._store, keys, timeout_s, self._lost)


T = TypeVar("T")

_SEEN_BY_ALL: Final = frozenset({"forward", "backward", "step"})


class SharedObserver(Observer):
    """Hands on what several sessions of one rank see; they do not close it.

    What all of them see, the passes and steps, is left out, and so are flows: tasks of different
    sessions have the same numbers.
    """

    def __init__(self, observers: Observers) -> None:
        self._observers = observers

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        if track not in _SEEN_BY_ALL:
            self._observers.on_span(track, name, start_ns, end_ns, args)


def shared_observers(observers: Observers) -> Observers:
    """What hands on to these, if there are any."""
    return Observers([SharedObserver(observers)] if observers else [])


def open_session(
    root: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    place: Place,
    everyone: Group,
    store: Store,
    config: Config,
    observers: Observers,
    name: str,
) -> HookedSession:
    """A session that averages gradients over the ranks of a place; collective among them.

    Args:
        root: the module whose call is a forward pass.
        named: the parameters that are on this place.
        everyone: the group of all ranks: if it loses one, no rank waits for that one.
        store: of all ranks.
    """
    label = f"{name}.{place.first}-{place.width}"
    slots = [Slot(parameter_name, parameter) for parameter_name, parameter in named]

    def opened(kind: str, purpose: str, members: object) -> Group:
        group_name = f"{label}/{purpose}"
        prefixed = PrefixStore(f"bytesched/{group_name}", store)
        timeout_s = config.timeout_s
        return open_gloo(
            GuardedStore(prefixed, everyone.lost, timeout_s=timeout_s),
            store,
            everyone.rank - place.first,
            place.width,
            name=group_name,
            timeout_s=timeout_s,
        )

    with Joining(opened, config) as ranks:
        data = ranks.open("data")
        ranks.agree(statements(slots, optimizer, config))
        session = HookedSession(
            root,
            Terms(
                slots,
                config,
                GroupWire(data, data, [], slots[0].parameter.device),
                observers,
                setting_of(config, BUCKET_BYTES["gloo"]),
            ),
            sync=lambda: True,
            find_unused=False,
        )
    try:
        why = why_whole(root, optimizer, type(optimizer), config)
        add_optimizer(session, optimizer, type(optimizer), why)
    except BaseException:
        session.close()
        raise
    return session


def made_on_all_ranks(group: Group, make: Callable[[], T], what: str) -> T:
    """What ``make`` returns, if it does on every rank; collective.

    Raises its error here, and PluginError on the other ranks, which would wait for this one.
    """
    error: Exception | None = None
    try:
        made = make()
    except Exception as raised:  # noqa: BLE001 - raised below
        error = raised
    texts = group.gather_text(what, "" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise PluginError(f"rank {rank} could not make {what}: {text}")
    return made
