"""What a link allows: the bound T*, how long collectives take, and clusters in virtual time."""
