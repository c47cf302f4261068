"""The seam between a session and a tuner: what can change while training runs, and who decides.

Rank 0's session asks its `Tuner` for a `Decision` and gives it to all ranks, which change together
at the same step. Between two decisions nothing is sent, and nothing is waited for. A plugin knows
this module and no tuner; a tuner knows this module and no plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bytesched.errors import ConfigError
from bytesched.link.sizes import Probe
from bytesched.policy import policy_names
from bytesched.values import parse_size, size_text

__all__ = [
    "KNOBS",
    "Decision",
    "RunFacts",
    "Setting",
    "Steps",
    "Tuner",
]

#: what a plugin may publish as changeable at run time; the names of `Setting`'s fields
KNOBS = ("partition_bytes", "credit_bytes", "policy", "enabled")


@dataclass(frozen=True, slots=True)
class Setting:
    """What can change between two steps. It never changes a result.

    Raises `ConfigError` for sizes that cannot be used.
    """

    partition_bytes: int
    credit_bytes: int
    policy: str = "priority"
    #: False: the framework's own reduction, or what comes nearest to it at run time
    enabled: bool = True

    def __post_init__(self) -> None:
        for name in ("partition_bytes", "credit_bytes"):
            value = getattr(self, name)
            try:
                size = parse_size(value)
            except ValueError as error:
                raise ConfigError(f"{name} = {value!r}: {error}") from None
            if not size:
                raise ConfigError(f"{name} = {value!r}: a setting to be used has a size")
            object.__setattr__(self, name, size)
        if self.credit_bytes < self.partition_bytes:
            raise ConfigError(
                f"credit_bytes = {self.credit_bytes} is below partition_bytes = "
                f"{self.partition_bytes}, so no full partition could ever be sent"
            )

    def __str__(self) -> str:
        if not self.enabled:
            return "scheduling off"
        text = f"partition {size_text(self.partition_bytes)}, credit {size_text(self.credit_bytes)}"
        return text + ("" if self.policy == "priority" else f", policy {self.policy}")


@dataclass(frozen=True, slots=True)
class Decision:
    """What rank 0 has decided: this setting, from this step on, up to the next decision."""

    setting: Setting
    #: the number of steps until the next decision, at least 1
    next_in_steps: int

    def numbers(self) -> list[int]:
        """The decision as whole numbers, always as many; the ranks have the same policies."""
        setting = self.setting
        return [
            self.next_in_steps,
            setting.partition_bytes,
            setting.credit_bytes,
            policy_names().index(setting.policy),
            int(setting.enabled),
        ]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Decision:
        """The decision that `numbers` made these of."""
        next_in_steps, partition_bytes, credit_bytes, policy, enabled = numbers
        setting = Setting(partition_bytes, credit_bytes, policy_names()[policy], bool(enabled))
        return cls(setting, next_in_steps)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known about cluster and model when the first step is over."""

    #: of the reduction, such as "gloo" or "horovod"
    backend: str
    #: ranks on each host, largest first
    ranks_per_host: tuple[int, ...]
    #: "cpu", or the accelerator's name
    device: str
    #: name and version, such as "torch 2.13.0"
    framework: str
    #: all gradients together
    model_bytes: int
    #: a digest of the parameters' shapes and dtypes, in their order, of what they are compressed
    #: to, and of whether updates cross the barrier
    signature: str
    #: of the link, by growing size
    probes: tuple[Probe, ...]
    #: what would hold without a tuner
    untuned: Setting
    #: what can be changed, of `KNOBS`
    knobs: frozenset[str]
    #: steps after the first one in which nothing is as it stays
    first_steps: int
    #: the same after each change
    changed_steps: int


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps since the last decision, all under its setting."""

    #: from the beginning of each step to the beginning of the next
    durations_s: tuple[float, ...]
    #: while so long something was on the link, until all sums of these steps were there
    busy_s: float = 0.0
    #: bytes of gradients that were sent meanwhile, and in how many chunks
    sent_bytes: int = 0
    sent_chunks: int = 0


class Tuner(Protocol):
    """Decides on rank 0, in the thread that trains; the other ranks have none.

    An exception ends the tuning and not the training: the session goes on with the last decision.
    """

    def begin(self, facts: RunFacts) -> Decision:
        """The first decision, before anything was scheduled."""

    def decide(self, steps: Steps) -> Decision:
        """The next decision, asked for after as many steps as the last one named."""

    def close(self) -> None:
        """Training is over, at any moment of the tuning."""
