"""A worker's access to what its servers keep of a key: the value, and the optimizer's state."""

from __future__ import annotations

import json
from typing import Any

import torch

from bytesched.kvstore.protocol import Ended

from ..loop import Loop
from ..memory import memory_of, packed_state, unpacked_state
from ..messages import TO_SERVER, Message, Op, pull_tag
from .calls import Calls
from .keys import Remote

__all__ = ["States"]


class States:
    """Fetches states, and sends them; both wait for the server."""

    def __init__(self, calls: Calls, loop: Loop) -> None:
        self._calls = calls
        self._loop = loop
        calls.on(Op.STATE, self._receive)
        #: what was asked for, by number of the key
        self._asked: dict[int, list[Any]] = {}

    def fetch(self, remote: Remote) -> dict[str, torch.Tensor]:
        """The value, named "value", and the optimizer's state."""
        received: list[Any] = []

        def begin(ended: Ended) -> None:
            what = f"state of key {remote.key!r}"
            if self._calls.expect("state", remote.number, what, remote.server, ended):
                self._asked[remote.number] = received
                message = Message(Op.GET_STATE, remote.number)
                self._loop.send_message(remote.server, TO_SERVER, message)

        self._calls.wait(f"get_state of key {remote.key!r}", begin)
        what, data = received
        return unpacked_state(what, data)

    def send(self, remote: Remote, state: dict[str, torch.Tensor]) -> None:
        """Returns when the server has taken ``state``."""
        what, data = packed_state(state)
        call = f"set_state of key {remote.key!r}"
        memory = memory_of(data)
        self._calls.ask(Op.SET_STATE, remote.server, call, remote.number, what, memory)

    def _receive(self, rank: int, message: Message) -> None:
        """A state is about to come; the loop's thread."""
        data = torch.empty(message.nbytes, dtype=torch.uint8)

        def arrived() -> None:
            self._asked.pop(message.key).extend([json.loads(message.text), data])
            self._calls.came("state", message.key)

        self._loop.receive(memory_of(data), rank, pull_tag(message.key), arrived)
