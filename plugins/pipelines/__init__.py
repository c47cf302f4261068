"""Pipelines of ``torch.distributed.pipelining``: its orders, and gradients between its copies."""
