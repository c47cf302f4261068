"""One wrapped model, from its first backward pass to unwrap. Knows no wire.

A `Session` hooks the model and its optimizers; what the hooks do is in its two lives, `WarmingUp`
and `Running`. Its seams to what reduces gradients are `Backend`, the ranks, and `Carrier`, which
takes chunks and reports each as reduced; `ScheduledCarrier` is the one that schedules.
"""

from __future__ import annotations

from bytesched.plugins.session.backend import Backend
from bytesched.plugins.session.carrier import Carrier
from bytesched.plugins.session.scheduled import ScheduledCarrier
from bytesched.plugins.session.session import Session

__all__ = ["Backend", "Carrier", "ScheduledCarrier", "Session"]
