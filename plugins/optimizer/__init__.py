"""The user's own optimizer, run later, on a part of the model."""
