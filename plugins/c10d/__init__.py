"""torch.distributed: groups of our own, one order on all ranks, DDP as a shell."""
