"""Jobs that share a device: they take turns, and one computes while gradients of others travel."""
