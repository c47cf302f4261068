"""Which optimizers may be run on a part of their parameters, or on a part of one.

Those of torch, those of other packages whose source was read, and those that their users vouch for;
as far as their ``step()`` runs what their package says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from types import FunctionType, MethodType
from typing import Any, Final, TypeVar
from weakref import WeakSet

import torch

from bytesched.errors import PluginError

from .surroundings import why_not_frozen

#: what ``Optimizer.__init__`` gives an instance for its hooks
HOOKS: Final = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def _nothing() -> None:
    pass


#: of torch's wrapper around every ``step`` that runs hooks
_HOOKED_CODE: Final = torch.optim.Optimizer.profile_hook_step(_nothing).__code__


def is_hooked(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether ``kind.step`` is what runs the hooks of an optimizer, and nobody has replaced it."""
    return getattr(kind.step, "__code__", None) is _HOOKED_CODE


def stepping_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose hooks see every step over the parameters of ``optimizer``.

    A shell, as trainers put around an optimizer, has no hooks of its own, or does more than one
    step of the optimizer in it. Raises `PluginError` for one without an optimizer in it.
    """
    seen = {id(optimizer)}
    while (inside := _inside(optimizer)) is not None and id(inside) not in seen:
        optimizer = inside
        seen.add(id(optimizer))
    own = vars(optimizer)
    missing = [name for name in ("state", "param_groups", *HOOKS) if name not in own]
    if missing or not hasattr(type(optimizer).step, "hooked"):
        raise PluginError(
            f"{type(optimizer).__name__} never called Optimizer.__init__, and holds no optimizer "
            "over all of its parameters: wrap what it delegates to"
        )
    return optimizer


def _inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """An optimizer that is an attribute of ``optimizer``, over all of its parameters."""
    mine = _parameter_ids(optimizer)
    for value in vars(optimizer).values():
        # Not isinstance: it reads the class of proxies of all kinds.
        if issubclass(type(value), torch.optim.Optimizer) and mine <= _parameter_ids(value):
            return value  # type: ignore[no-any-return]
    return None


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}


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


def _known(kind: type) -> Known | None:
    return KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")


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
    if kind not in SEPARABLE and kind not in _vouched_for:
        known = _known(kind)
        version = "" if known is None else known.why_not()
        if known is None or version:
            version = version and f" ({version})"
            return (
                f"{kind.__name__} is not known to update each parameter on its own{version}; if "
                f"it does, say so: bytesched.separable({kind.__name__})"
            )
    altered = "" if kind in _vouched_for else why_altered(optimizer, kind)
    return altered or why_not_frozen(optimizer.param_groups)


def why_not_sharded(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why no rank can update a part of the parameters alone; empty if each can."""
    known = None if kind in _vouched_for else _known(kind)
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


# -- whether its code is that of its package ------------------------------------------

#: whose functions a package may use beside its own
_TRUSTED: Final = sys.stdlib_module_names | {"torch", "typing_extensions"}

#: what torch.compile leaves in a module when it has compiled a ``step()``; nothing else uses it
_COMPILED: Final = ("__compiled_fn_", "__resume_at_")

#: what a ``step()`` does not call on itself
BESIDE: Final = frozenset(name for name in vars(torch.optim.Optimizer) if name[0] != "_")


def optimizer_classes(kind: type) -> list[type[torch.optim.Optimizer]]:
    """Those whose code an optimizer of ``kind`` runs."""
    return [each for each in kind.__mro__ if issubclass(each, torch.optim.Optimizer)]


def why_altered(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why ``optimizer`` does not do what is written in the class ``kind``; empty if it does."""
    own = vars(optimizer)
    classes = optimizer_classes(kind)
    for name in {name for each in classes for name in vars(each)} - BESIDE:
        if name in own and callable(own[name]):
            return f"{name} of this {kind.__name__} has been replaced"
    # torch's own classes call no attribute; those of others choose one of their module.
    is_chosen = _owner(kind) != "torch"
    for name, value in own.items():
        if is_chosen and isinstance(value, FunctionType) and name not in BESIDE:
            module = value.__globals__.get("__name__")
            if module != kind.__module__:
                return f"{name} of this {kind.__name__} is a function of another module, {module}"
    for each in classes:
        module = each.__module__
        for where, names in ((each.__name__, vars(each)), (module, vars(sys.modules[module]))):
            for name, value in tuple(names.items()):
                if name.startswith(_COMPILED):
                    continue
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if not _TRUSTED.union((_owner(each),)).issuperset(map(_package, _layers(value))):
                    return f"{where}.{name} has been replaced"
    return ""


def _owner(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _layers(value: Any) -> Iterator[FunctionType]:
    """A function, and what it is wrapped around."""
    while isinstance(value, (FunctionType, MethodType, partial)):
        if isinstance(value, partial):
            value = value.func
        elif isinstance(value, MethodType):
            value = value.__func__
        else:
            yield value
            value = getattr(value, "__wrapped__", None)


def _package(function: FunctionType) -> str:
    """Of the code, which no decorator can rename."""
    return str(function.__globals__.get("__name__")).partition(".")[0]
