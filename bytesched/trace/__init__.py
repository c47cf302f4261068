"""What happened: written while training, read and merged afterwards."""
