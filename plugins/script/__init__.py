"""Scripts that are left as they are: what they make is seen, and wrapped."""
