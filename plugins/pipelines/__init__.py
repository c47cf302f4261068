"""Pipelines of torch: schedules whose stages are replicated, and their gradients reduced."""
