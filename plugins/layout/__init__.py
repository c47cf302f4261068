"""Gradients in arenas in forward order, cut into chunks, bundled for their update."""
