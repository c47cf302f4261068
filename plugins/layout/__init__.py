"""Where the elements of tensors lie in memory, and what stands for their values."""
