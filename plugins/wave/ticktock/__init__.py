"""The waves of one rank, which overlap."""
