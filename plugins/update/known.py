"""Optimizers of other packages whose source was read: each parameter is updated on its own.

Each class was read in the first and the last version that is listed, is the same in both but for
what does not matter here, and is trained beside plain DDP in ``tests/procs/integrations``. What
was read and is not listed, and why, stands in the reference of compatibility.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Final

__all__ = ["KNOWN", "Known", "qualified"]


@dataclass(frozen=True)
class Known:
    """Where a class comes from, and which versions of it were read.

    Args:
        package: as it is installed.
        first: the first version that was read.
        last: the last one.
        shards: whether the ranks may each have a part of its state: no method but ``step()``
            needs all of it.
    """

    package: str
    first: str
    last: str
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
