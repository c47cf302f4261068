"""The waves of one rank."""
