"""Several hosts on one machine, with links of a given rate between them, and ranks on them."""
