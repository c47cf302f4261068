"""The optimizer of the user, run later, and on a part of the model."""
