"""Which optimizers may be run on a part of their parameters, or on a part of one.

Those of torch, those of other packages whose source was read, and those that their users vouch for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Final, TypeVar
from weakref import WeakSet

import torch

from bytesched.errors import PluginError

from .genuine import is_hooked, stepping_optimizer, why_altered
from .surroundings import why_not_frozen


@dataclass(frozen=True)
class Known:
    """Where a class comes from, and which versions of it were read."""

    package: str
    first: str
    last: str
    #: the ranks may each have a part of its state: no method but ``step()`` needs all of it
    shards: bool = True

    def why_not(self) -> str:
        """Why the version that is installed is not a known one; empty if it is."""
        try:
            version = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return f"{self.package} is not installed as a package, so that its version is not known"
        if _numbers(self.first) <= _numbers(version) <= _numbers(self.last):
            return ""
        read = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"of {self.package}, {read} was read, and not {version}"


_LION = Known("lion-pytorch", "0.2.2", "0.2.5")
# Their train() and eval() move all parameters by all of the state.
_SCHEDULE_FREE = Known("schedulefree", "1.4", "1.4.1", shards=False)
_TIMM = Known("timm", "1.0.31", "1.0.31")
_TRANSFORMERS = Known("transformers", "4.57.6", "5.23.0")

#: by module and name
KNOWN: Final = {
    "lion_pytorch.lion_pytorch.Lion": _LION,
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": _SCHEDULE_FREE,
    "schedulefree.radam_schedulefree.RAdamScheduleFree": _SCHEDULE_FREE,
    "schedulefree.sgd_schedulefree.SGDScheduleFree": _SCHEDULE_FREE,
    "timm.optim.adafactor_bv.AdafactorBigVision": _TIMM,
    "timm.optim.adamp.AdamP": _TIMM,
    "timm.optim.lion.Lion": _TIMM,
    "timm.optim.nadamw.NAdamW": _TIMM,
    "timm.optim.rmsprop_tf.RMSpropTF": _TIMM,
    "timm.optim.sgdp.SGDP": _TIMM,
    "timm.optim.sgdw.SGDW": _TIMM,
    "transformers.optimization.Adafactor": _TRANSFORMERS,
}


def qualified(kind: type) -> str:
    """The key of ``kind``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _numbers(version: str) -> tuple[float, ...]:
    """As versions are ordered; one that is no plain release is beyond all."""
    if re.fullmatch(r"\d+(\.\d+)*", version) is None:
        return (float("inf"),)
    numbers = [float(number) for number in version.split(".")]
    return (*numbers, *[0.0] * (8 - len(numbers)))


OptimizerT = TypeVar("OptimizerT", bound=type[torch.optim.Optimizer])

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
#: Classes whose update of one element depends on that element alone.
_ELEMENTWISE = frozenset(_NAMES.split())

#: Those whose update of one parameter depends on that parameter alone. Exact classes: a subclass
#: may do anything.
SEPARABLE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (*_ELEMENTWISE, "Adafactor", "Muon")
    if hasattr(torch.optim, name)
)

#: by their users' word
_vouched_for: WeakSet[type] = WeakSet()


def separable(kind: OptimizerT) -> OptimizerT:
    """See :func:`bytesched.separable`."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise PluginError(f"{kind!r} is not a class of torch optimizers")
    _vouched_for.add(kind)
    return kind


def explain_optimizer(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None
) -> str:
    """See :func:`bytesched.explain_optimizer`; ``kind``, or its own class, does the update."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(f"{type(optimizer).__name__} is not a torch optimizer")
    stepping = stepping_optimizer(optimizer)
    kind = kind or type(stepping)
    why = why_not_deferred(stepping, kind)
    return why or f"{kind.__name__} updates each parameter on its own: its updates may come later"


def why_not_deferred(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why ``optimizer``, updated by ``kind``, cannot be bundle by bundle; empty if it can.

    What nobody knows cannot: that an optimizer behaved well when it was tried says nothing of the
    steps that follow.
    """
    if not is_hooked(kind):
        return f"{kind.__name__}.step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True"
    if not is_known(kind):
        other = KNOWN.get(qualified(kind))
        version = f" ({other.why_not()})" if other else ""
        return (
            f"{kind.__name__} is not known to update each parameter on its own{version}; if it "
            f"does, say so: bytesched.separable({kind.__name__})"
        )
    altered = "" if kind in _vouched_for else why_altered(optimizer, kind)
    return altered or why_not_frozen(optimizer.param_groups)


def is_known(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether that very class updates each parameter on its own, as was read or is vouched for."""
    if kind in SEPARABLE or kind in _vouched_for:
        return True
    known = KNOWN.get(qualified(kind))
    return known is not None and not known.why_not()


def why_not_sharded(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why no rank can update a part of the parameters alone; empty if each can."""
    known = None if kind in _vouched_for else KNOWN.get(qualified(kind))
    if known is not None and not known.shards:
        return f"methods of {kind.__name__} beside step() need the state of all parameters"
    for group in optimizer.param_groups:
        if len(set(map(id, group["params"]))) < len(group["params"]):
            return "a group names a parameter twice"
    return why_not_deferred(optimizer, kind)


def refuse_to_shard(optimizer: torch.optim.Optimizer) -> None:
    """Raises PluginError unless each rank can update its part of the parameters alone."""
    if why := why_not_sharded(optimizer, type(optimizer)):
        raise PluginError(f"shard=True needs an optimizer that can update a part alone: {why}")


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """True if an optimizer of that very class may be given any part of a parameter."""
    return kind.__name__ in _ELEMENTWISE and kind is getattr(torch.optim, kind.__name__, None)
