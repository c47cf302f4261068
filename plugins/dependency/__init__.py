"""Who waits for what: gates in front of modules, lazy gradients, one way to wait for a round."""
