"""Horovod: its optimizer as a shell, its all-reduce as the wire."""

from __future__ import annotations

from .optimizer import ScheduledOptimizer

__all__ = ["ScheduledOptimizer"]
