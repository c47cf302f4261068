"""AdamA: gradients folded into Adam's moments as they come, which travel in their place."""
