"""What a worker asks of the servers: the calls of a store."""
