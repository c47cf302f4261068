"""A model whose partitions visit every rank."""
