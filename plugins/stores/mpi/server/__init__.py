"""What a server keeps, sums and answers."""
