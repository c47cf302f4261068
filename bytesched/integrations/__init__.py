"""Trainers of others: what each of them needs to be scheduled, by a module of its own.

`lightning.SchedulingCallback`, `transformers.SchedulingCallback`, `accelerate.wrap`. None of these
packages is a dependency: a module imports its own.
"""
