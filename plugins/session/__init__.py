"""One wrapped model, from its first backward pass to unwrap. Knows no wire.

A `Session` hooks the model and its optimizers; what the hooks do is in its two lives, `WarmingUp`
and `Running`. Its seams to what reduces gradients are `Backend`, the ranks, and `Carrier`, which
takes chunks and reports each as reduced; `ScheduledCarrier` is the one that schedules.
"""
