"""What a script asks of gradients between two hops: norms, and scalings that are noted down."""
