"""Process groups of our own: opened, led in one order, and failing with a name."""
