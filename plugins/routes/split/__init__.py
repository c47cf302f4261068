"""A sharded update: slices to the owners of gradients, and parameters from there to all ranks."""
