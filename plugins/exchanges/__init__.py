"""Rows between ranks: what they tell each other first, and all-to-alls as urgent tasks."""
