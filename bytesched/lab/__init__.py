"""Several hosts on one machine, and ranks on them."""
