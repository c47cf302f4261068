"""What a server answers."""
