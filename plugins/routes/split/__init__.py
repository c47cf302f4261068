"""The split all-reduce: slices to the owners of gradients, sums from there to all ranks."""
