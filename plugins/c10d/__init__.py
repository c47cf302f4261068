"""torch.distributed: a model in DDP or beside it, and how its ranks come together."""
