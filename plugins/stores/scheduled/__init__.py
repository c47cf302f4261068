"""Any store, its pushes and pulls in the order of urgency. `training` trains a model through it."""
