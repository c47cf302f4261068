"""What a link allows: the bound T*, the sizes that come near it, and a simulated one."""
