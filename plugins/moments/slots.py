"""What travels in place of gradients, moments, and what stands for a gradient meanwhile."""

from __future__ import annotations

from collections.abc import Container, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import ConfigError, PluginError

from ..layout import shaped
from ..planned.buckets import Bucket, Member
from ..planned.bundles import Slot
from ..planned.entries import Entry
from ..planned.hook_source import HookSource
from ..proxies.pending_grads import PendingGrad, make_plain

ADAMA: Final = "adama"


def check_request(accumulate: Any, micro_batches: Any) -> None:
    """Raises ConfigError for what is wrong with these two arguments of ``wrap``."""
    if accumulate not in (None, ADAMA):
        raise ConfigError(f"accumulate = {accumulate!r}: {ADAMA!r}, or leave it out")
    if type(micro_batches) is not int or micro_batches < 1:
        raise ConfigError(
            f"micro_batches = {micro_batches!r}: a whole number, at least 1, of backward passes "
            "before each step()"
        )
    if accumulate is None and micro_batches != 1:
        raise ConfigError(
            f"micro_batches = {micro_batches} without accumulate = {ADAMA!r}: ordinary "
            "accumulation needs no_sync() alone"
        )


@dataclass(frozen=True)
class Accumulation:
    """What a script asks for: ``micro_batches`` backward passes before each ``step()``."""

    optimizer: torch.optim.Optimizer
    micro_batches: int


class MomentSlot(Slot):
    """One parameter, and its moments, which lie in a bucket.

    Between two mini-batches they are those of Adam. While one is folded, they are this rank's
    share of what the sum over the ranks will be. ``awaits`` is None until they are sent. It is also
    what its gradient waits for, in vain (see `Sum`).
    """

    __slots__ = ("folds", "mean", "released", "square")
    #: no question about the gradient can be answered without it
    taken = True

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, parameter)
        #: the mean of gradients, and of their squares, both in the parameter's shape
        self.mean = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        self.square = self.mean
        #: gradients that were folded since the last step
        self.folds = 0
        #: what ``parameter.grad`` is between backward and ``step()``
        self.released: torch.Tensor | None = None

    def lay_out(self, memory: torch.Tensor) -> None:
        """The moments move to the two halves of ``memory``; nothing of them is under way."""
        half = self.parameter.numel()
        mean, square = shaped(memory[:half], self.parameter), shaped(memory[half:], self.parameter)
        self.mean, self.square = mean.copy_(self.mean), square.copy_(self.square)
        self.awaits = ()

    def show(self, entry: MutableMapping[str, Any]) -> None:
        """``entry``, of the optimizer's state, has the moments where they lie."""
        entry["exp_avg"], entry["exp_avg_sq"] = self.mean, self.square

    # -- folding -----------------------------------------------------------------------

    def adopt(self, entry: MutableMapping[str, Any]) -> None:
        """The moments are those of ``entry`` from now on; zero, where it has none."""
        if entry.get("exp_avg") is self.mean and entry.get("exp_avg_sq") is self.square:
            return
        # A new optimizer, or one whose state was loaded, or a script has set.
        nothing = torch.zeros((), dtype=self.mean.dtype, device=self.mean.device)
        self.mean.copy_(entry.get("exp_avg", nothing))
        self.square.copy_(entry.get("exp_avg_sq", nothing))
        entry.setdefault("step", torch.zeros((), dtype=torch.float32))
        self.show(entry)

    def fold(self, gradient: torch.Tensor, mean_factor: float, square_factor: float) -> None:
        """Adds ``gradient`` and its square, times these."""
        self.mean.add_(gradient, alpha=mean_factor)
        self.square.addcmul_(gradient, gradient, value=square_factor)
        self.folds += 1

    # -- what stands for the gradient --------------------------------------------------

    def release(self) -> None:
        """There is a gradient without memory from now on, any read of which raises PluginError."""
        if type(self.released) is not PendingGrad:
            parameter = self.parameter
            # What reads it from C++ cannot be refused.
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            made: Any = nothing.expand(parameter.shape)
            made.__class__ = PendingGrad
            made.sum_ = self
            self.released = made
        self.parameter.grad = self.released

    def withhold(self) -> bool:
        """There is no gradient, if it is one whose reads are refused; whether it was."""
        is_released = self.released is not None and self.parameter.grad is self.released
        if is_released:
            self.parameter.grad = None
        return is_released

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def settle(self) -> NoReturn:
        raise PluginError(
            f"the gradient of {self.name!r} has been folded into Adam's moments and released "
            "(accumulate='adama'): clipping by norm, GradScaler and whatever else reads p.grad "
            "need training without it"
        )

    def zeroes(self) -> bool:
        """See `Sum`: it gets memory of its own."""
        gradient = self.released
        if type(gradient) is PendingGrad:
            make_plain(gradient)
            gradient.data = torch.empty(
                gradient.shape, dtype=gradient.dtype, device=gradient.device
            )
        return True


class MomentEntry(Entry):
    """One parameter, whose moments are both halves of what it has in a bucket."""

    __slots__ = ("_member",)

    slot: MomentSlot
    _member: Member

    @property
    def numel(self) -> int:
        return 2 * super().numel

    def let_go(self) -> None:
        """See `Entry`: moments stay until they are laid out anew."""

    def lay_out(self, member: Member, memory: torch.Tensor) -> None:
        self._member = member
        self.slot.lay_out(memory)

    def fill(self, scale: float) -> bool:
        """See `Entry`: gradients were scaled as they were folded."""
        self.slot.awaits = self._member.chunks
        return True


class MomentSource(HookSource):
    """The moments of one model's parameters, after each mini-batch."""

    entry_kind: ClassVar[type[Entry]] = MomentEntry

    def _hand_out(self, bucket: Bucket, left: Container[int] = ()) -> bool:
        """See `Source`: what waits for sums is ``step()`` alone."""
        for member in bucket.members:
            entry = self._by_id[id(member.parameter)]
            assert isinstance(entry, MomentEntry)
            entry.slot.release()
        return True


def folding_statements(
    accumulation: Accumulation,
    slots: Sequence[MomentSlot],
    config: Config,
    *,
    find_unused: bool | None,
    has_groups: bool,
) -> list[str]:
    """What all ranks must agree on. Raises PluginError for what it is not there for."""
    optimizer = accumulation.optimizer
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise PluginError(
            f"accumulate='adama' folds gradients into the moments of Adam and AdamW, and this is a "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    groups = optimizer.param_groups
    for name, is_set, why in (
        ("split = 'on'", config.split == "on", "there is no gradient whose norm could be asked"),
        (
            f"compression = {config.compression!r}",
            config.compression != "none",
            "moments are kept from step to step, and would lose what is rounded away",
        ),
        (
            "find_unused_parameters = True",
            find_unused,
            "moments of a parameter that no rank uses would change",
        ),
        ("groups", has_groups, "moments are summed over all ranks"),
        (
            "differentiable = True",
            any(group["differentiable"] for group in groups),
            "a step has no graph",
        ),
    ):
        if is_set:
            raise PluginError(f"accumulate='adama' and {name}: {why}; leave one of them out")
    managed = {id(parameter) for group in groups for parameter in group["params"]}
    for slot in slots:
        if id(slot.parameter) not in managed:
            raise PluginError(
                f"accumulate='adama': parameter {slot.name!r} requires a gradient, and is not in "
                "the optimizer"
            )
        if slot.parameter.is_complex():
            raise PluginError(f"accumulate='adama': parameter {slot.name!r} is complex")
    return [f"accumulate = {ADAMA!r}, micro_batches = {accumulation.micro_batches}"]
