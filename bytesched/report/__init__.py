"""What happened, as pictures."""
