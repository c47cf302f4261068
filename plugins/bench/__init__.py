"""What runs on ranks that are measured: models, systems, timed blocks."""
