"""A model in DDP whose gradients are sent in an order that is known before they are there.

DDP's reducer says what is ready, chunks are issued in its hooks, and whoever uses a parameter first
waits for the chunks behind it and runs the update there.
"""
