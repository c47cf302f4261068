# Sourced by scripts that install torch, whose versions stand here and nowhere else.

# The oldest that is supported, the one that the whole suite runs with, and the newest that is tried.
torch_oldest=2.4.1
torch_pinned=2.13.0
torch_newest=2.15.0
