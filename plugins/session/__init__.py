"""One wrapped model, from its first backward pass to unwrap. Knows no wire."""
