"""Scripts that nobody touched: what they make is noticed, and wrapped."""
