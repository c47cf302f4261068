"""All-to-alls of an unchanged script: each is an urgent section, from its call to its end.

A forward or backward pass waits for what they bring. From torch 2.15 on, hooks of process groups
see them, whoever starts them: functional collectives, compiled code and C++ as well. Groups of our
own have no hooks. Before, the functions of ``torch.distributed`` are replaced.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import sys
from typing import Any, Final

from bytesched.share.turn import HELD, released
from bytesched.urgency import begin

_NAMES: Final = ("all_to_all_single", "all_to_all")
#: what hooks call them
_NAMES_IN_HOOKS: Final = {"ALLTOALL_BASE": "all_to_all_single", "ALLTOALL": "all_to_all"}
#: a group has one hook of each number: one that nobody else takes
_HOOK: Final = int.from_bytes(b"urgent", "big")


def mark_all_to_alls(module: Any) -> None:
    """Make those of ``torch.distributed.distributed_c10d`` urgent, before anything refers to them.

    They cost two counts while nothing is wrapped. One that is asynchronous ends with its work. On a
    GPU, where a call returns as soon as it is queued, its section ends with its call.
    """
    if hasattr(getattr(module, "ProcessGroup", None), "register_post_hook"):
        _hook_groups(module)
    else:
        _replace_functions(module)


def _hook_groups(module: Any) -> None:
    """Those there are, and all that are made from now on."""
    register = module._register_process_group

    @functools.wraps(register)
    def registered(name: Any, group: Any) -> None:
        register(name, group)
        group.register_post_hook(_HOOK, _issued)

    module._register_process_group = registered
    for group in module._world.pg_map:
        group.register_post_hook(_HOOK, _issued)
    # Groups that a script does not destroy outlive the interpreter, which hooks must not.
    atexit.register(_unhook_groups, module)


def _unhook_groups(module: Any) -> None:
    for group in module._world.pg_map:
        group.unregister_post_hook(_HOOK)


def _issued(operation: Any) -> None:
    # Not before it is issued: one that raises then has no second hook in which to end.
    name = _NAMES_IN_HOOKS.get(operation.name.name)
    if name is None or operation.work is None:
        return
    try:
        future = operation.work.get_future()
    except RuntimeError:
        # Its backend has none, so that nobody tells when it is over.
        return
    section = begin(name)
    future.add_done_callback(lambda _: section.end())


def _replace_functions(module: Any) -> None:
    package = sys.modules.get("torch.distributed")
    for name in _NAMES:
        plain = getattr(module, name)
        setattr(module, name, _marked(plain))
        if getattr(package, name, None) is plain:
            # It was imported before we were asked to watch.
            setattr(package, name, getattr(module, name))


def _marked(function: Any) -> Any:
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if HELD and not parameters.bind(*args, **kwargs).arguments.get("async_op"):
            # It waits for other ranks, which may need a turn that another job has.
            with released():
                return urgent_call(*args, **kwargs)
        return urgent_call(*args, **kwargs)

    def urgent_call(*args: Any, **kwargs: Any) -> Any:
        section = begin(function.__name__)
        work = None
        try:
            work = function(*args, **kwargs)
        finally:
            # None: it is over, or has raised, or this rank is not of its group.
            if work is None:
                section.end()
        if work is not None:
            try:
                work.get_future().add_done_callback(lambda _: section.end())
            except RuntimeError:
                # A backend without futures: when it is over cannot be seen.
                section.end()
        return work

    return call
