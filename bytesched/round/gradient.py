"""One gradient within a round: its states, and what leads from one to another.

What backward, the wire and ``step()`` do with it is its *state*. What a script did with it
meanwhile is data beside that (`Gradient.is_read` and the like).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from bytesched.errors import InvalidTransition
from bytesched.task import CommTask

__all__ = [
    "AFTER",
    "TAKEN",
    "TO_COME",
    "UNTAKEN",
    "Gradient",
    "GradientEvent",
    "GradientState",
    "refused",
]


class GradientState(Enum):
    """Where a gradient stands within one round."""

    #: no step is to take it: none was computed, or a step has used it at once
    FREE = "free"
    #: a round has begun, and backward has not come to it
    AWAITED = "awaited"
    #: the same, and nothing has read its parameter since the step that updated it
    UNREAD = "unread"
    #: backward is over and has not come to it: zeros travel, and perhaps another rank has one
    ABSENT = "absent"
    #: it is there, and its sum is not
    TRAVELLING = "travelling"
    #: its sum is there, and no step has taken it
    SUMMED = "summed"
    #: a step has taken it, and its sum is not there
    ARMED = "armed"
    #: a step has taken it, and its sum is there
    DUE = "due"
    #: its update is done
    APPLIED = "applied"
    #: this process was forked while it travelled: it never comes
    LOST = "lost"

    # That of Enum is written in Python, and asked for at every transition.
    __hash__ = object.__hash__


class GradientEvent(Enum):
    """What can happen to a gradient."""

    #: a round begins
    ROUND = "round"
    #: a round begins, and the parameter waits for its first use since the last update
    ROUND_HELD = "round while held"
    #: the parameter is read
    READ = "read"
    #: backward has computed it
    GRADIENT = "gradient"
    #: backward is over without it
    NONE = "none"
    #: some rank has computed it
    USED = "used"
    #: no rank has
    UNUSED = "unused"
    #: the last of its chunks is summed
    SUM = "sum"
    #: a step takes it, to be applied later
    ARM = "arm"
    #: a step uses it at once
    STEP = "step"
    #: the update that a step has armed is done
    UPDATE = "update"
    #: the process is forked, and this is the child
    FORK = "fork"
    #: the same, and some of its chunks are under way
    FORK_UNDER_WAY = "fork under way"

    __hash__ = object.__hash__


_S, _E = GradientState, GradientEvent

#: The whole life of a gradient. A pair that is not listed is an InvalidTransition.
AFTER: Final[Mapping[tuple[GradientState, GradientEvent], GradientState]] = {
    (_S.FREE, _E.ROUND): _S.AWAITED,
    (_S.FREE, _E.ROUND_HELD): _S.AWAITED,
    # What travels for it in this round is zeros.
    (_S.FREE, _E.SUM): _S.FREE,
    (_S.FREE, _E.STEP): _S.FREE,
    (_S.AWAITED, _E.READ): _S.AWAITED,
    (_S.AWAITED, _E.GRADIENT): _S.TRAVELLING,
    (_S.AWAITED, _E.NONE): _S.ABSENT,
    (_S.UNREAD, _E.READ): _S.AWAITED,
    (_S.UNREAD, _E.NONE): _S.ABSENT,
    (_S.ABSENT, _E.SUM): _S.ABSENT,
    (_S.ABSENT, _E.USED): _S.TRAVELLING,
    (_S.ABSENT, _E.UNUSED): _S.FREE,
    (_S.TRAVELLING, _E.SUM): _S.SUMMED,
    (_S.TRAVELLING, _E.ARM): _S.ARMED,
    (_S.SUMMED, _E.ROUND): _S.AWAITED,
    (_S.SUMMED, _E.ROUND_HELD): _S.AWAITED,
    (_S.SUMMED, _E.STEP): _S.FREE,
    (_S.SUMMED, _E.ARM): _S.DUE,
    (_S.ARMED, _E.SUM): _S.DUE,
    (_S.DUE, _E.UPDATE): _S.APPLIED,
    (_S.APPLIED, _E.ROUND): _S.AWAITED,
    (_S.APPLIED, _E.ROUND_HELD): _S.UNREAD,
    (_S.APPLIED, _E.STEP): _S.APPLIED,
    **{(state, _E.FORK): _S.FREE for state in _S},
    **{(state, _E.FORK_UNDER_WAY): _S.LOST for state in _S},
}

#: it belongs to this round, and no step has taken it
UNTAKEN: Final = frozenset({_S.TRAVELLING, _S.SUMMED})
#: a step has taken it, to apply it later
TAKEN: Final = frozenset({_S.ARMED, _S.DUE, _S.APPLIED})
#: what is in its memory is of an earlier round
TO_COME: Final = frozenset({_S.AWAITED, _S.UNREAD})


@dataclass(eq=False, repr=False)
class Gradient:
    """One gradient, which travels in some chunks."""

    name: str
    state: GradientState = field(init=False, default=GradientState.FREE)
    chunks: list[CommTask] = field(init=False, default_factory=list)
    #: how often backward has come to it in this round
    fired: int = field(init=False, default=0)
    #: how often it must (static graphs may use a parameter several times)
    expected: int = field(init=False, default=1)
    #: backward has come to it without a round (`no_sync`) since the last one
    is_local: bool = field(init=False, default=False)
    #: the script sees it in memory of its own: what is summed is to be found there
    is_apart: bool = field(init=False, default=False)
    #: since it was handed out, it was read whole: there may be other tensors over its memory, and
    #: it may have other memory itself
    is_read: bool = field(init=False, default=False)

    def on(self, event: GradientEvent) -> None:
        """``event`` happens to it alone."""
        try:
            self.state = AFTER[self.state, event]
        except KeyError:
            raise refused(self, event) from None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.state.value}>"


def refused(of: object, event: Enum) -> InvalidTransition:
    """The error of an event that the state of something does not allow."""
    return InvalidTransition(f"{event.value!r} on {of!r}")
