"""A parameter server over MPI: open_store, workers, servers."""
