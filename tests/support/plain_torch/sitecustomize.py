"""Put on the path of plain DDP's runs, so that they end as what they did says.

A backward pass of torch 2.13 gives each operation it starts a copy of the calling thread's context.
The thread of Gloo that drops the operation, and with it the last hold on that object, needs the
interpreter's lock for it. If the interpreter has ended by then, it aborts the process. Compilation
alone reads that context: without it there is nothing to drop.
"""

from typing import Any

import torch

STASH, REMOVE = "_stash_obj_in_tls", "_remove_obj_from_tls"


def without_context(call: Any) -> Any:
    """``call``, but for the key "context"."""
    return lambda key, *value: None if key == "context" else call(key, *value)


for name in (STASH, REMOVE):
    # Other versions of torch may have none of this, and then need none.
    if hasattr(torch._C, STASH) and hasattr(torch._C, REMOVE):
        setattr(torch._C, name, without_context(getattr(torch._C, name)))
