"""Pipeline parallelism: orders of work on ranks, what they take, and a search for better ones."""
