"""The command that compares systems: what to measure, tables, T*."""
