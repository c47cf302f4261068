"""Parameter stores: pushes and pulls by urgency; a training over them; MPI and MXNet."""
