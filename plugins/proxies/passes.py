"""The entry of every backward pass of the process, whatever its graph.

Autograd adds to gradients and reads weights where no Python looks: nothing may be under way then.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Protocol
from weakref import ref

import torch
from torch import nn

from bytesched.errors import PluginError

#: why a model is left to DDP, where `are_in_a_context`
IN_A_CONTEXT = "its gradients go to a context of distributed autograd, and not to its parameters"


class Watcher(Protocol):
    """What is told of backward passes."""

    def backward_begins(self) -> None:
        """A backward pass is about to begin, not inside of another one. The calling thread."""

    def backward_ends(self) -> None:
        """It has returned."""

    def backward_failed(self, error: BaseException) -> BaseException:
        """It was ended by ``error``; returns what is raised in its place, or ``error`` itself."""


#: none of them is kept alive; with the only thread whose passes each is told of, if there is one
_watchers: tuple[tuple[ref[Watcher], int | None], ...] = ()
#: passes inside of others, of all threads: reentrant checkpoints
_inner: list[None] = []


def is_inside_another() -> bool:
    """Whether the current backward pass is inside of another one."""
    return bool(_inner)


def watch_passes(watcher: Watcher, *, thread: int | None = None) -> Callable[[], None]:
    """Tells ``watcher`` of every backward pass; returns what ends that.

    Args:
        thread: what begins the passes that it is told of; None: any thread.

    Raises `PluginError` for a torch whose backward passes have no common entry.
    """
    global _watchers
    _guard()
    watching = ref(watcher), thread
    _watchers = (*(other for other in _watchers if other[0]() is not None), watching)

    def end() -> None:
        global _watchers
        _watchers = tuple(other for other in _watchers if other is not watching)

    return end


def _guard() -> None:
    """Puts the watch in front of torch's own entry, once and for good."""
    entry = getattr(torch.autograd.graph, _NAME, None)
    if entry is None or not hasattr(torch.autograd, _NAME):
        raise PluginError(
            f"torch {torch.__version__} has no {_NAME}, through which backward passes go: set "
            "BYTESCHED_ENABLED=0, or use a version between 2.4 and 2.15"
        )
    if getattr(entry, "is_watched", False):
        return
    for module in (torch.autograd.graph, torch.autograd):
        setattr(module, _NAME, _watched(getattr(module, _NAME)))


_NAME = "_engine_run_backward"


def _watched(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            # Everything from before the pass around this one has come.
            _inner.append(None)
            try:
                return run(*args, **kwargs)
            finally:
                _inner.pop()
        if not _watchers:
            return run(*args, **kwargs)
        here = get_ident()
        watchers = [
            watcher
            for one, thread in _watchers
            if thread in (None, here) and (watcher := one()) is not None
        ]
        for watcher in watchers:
            watcher.backward_begins()
        try:
            found = run(*args, **kwargs)
        except BaseException as error:
            raised = error
            for watcher in watchers:
                raised = watcher.backward_failed(raised)
            if raised is error:
                raise
            raise raised from error
        for watcher in watchers:
            watcher.backward_ends()
        return found

    call.is_watched = True  # type: ignore[attr-defined]
    return call


def are_in_a_context() -> bool:
    """Whether gradients of what is computed now go to a context of distributed autograd."""
    rpc = getattr(torch._C, "_distributed_rpc", None)
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return False
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:
        return False
    return True


_STAGES: Final = "torch.distributed.pipelining.stage"


def refuse_stage(model: nn.Module) -> None:
    """Raises PluginError if ``model`` has become a stage of a pipeline after it was wrapped.

    Its schedule says when its gradients are complete, and some call no hook of a parameter.
    """
    if _is_stage(model):
        raise PluginError(
            f"this {type(model).__name__} was wrapped alone, and is a stage of a pipeline now: "
            "unwrap its optimizer, make the schedule, and call wrap(optimizer, schedule)"
        )


def _is_stage(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    if kind is None:
        return False
    # A stage, or its ``__dict__``.
    near = gc.get_referrers(module)
    dictionaries = [thing for thing in near if type(thing) is dict and "submod" in thing]
    owners = gc.get_referrers(*dictionaries) if dictionaries else []
    return any(
        # Not isinstance: it reads the class of proxies of all kinds.
        issubclass(type(thing), kind) and vars(thing).get("submod") is module
        for thing in (*near, *owners)
    )
