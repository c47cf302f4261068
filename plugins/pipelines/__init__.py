"""Pipelines of torch: schedules whose stages are replicated, and their gradients reduced."""

from .orders import ordered_schedule

__all__ = ["ordered_schedule"]
