"""A torch model trained through a store: gradients summed there, or parameters updated there."""
