"""A wrapped model, from attach to unwrap: what its hooks do in its two lives. It knows no wire.

A `session.Session` hooks the model and its optimizers; its lives are `warming.WarmingUp` and
`running.Running`. What reduces gradients is behind `routes.backend.Backend`, the ranks, and
`routes.carrier.Carrier`, which takes chunks and reports each as reduced.
"""
