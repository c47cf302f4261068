"""What a worker asks."""
