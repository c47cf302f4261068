"""What is learned in the first round and between later ones: agreement, sizes, settings."""
