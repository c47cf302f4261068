"""What happened: a Chrome trace per rank, written while training, read afterwards."""
