"""How bytes move: the seams to whatever carries chunks, and what carries them between ranks.

`backend.Backend` is the ranks of a session, `carrier.Carrier` takes chunks and reports each as
reduced; `scheduled.ScheduledCarrier` is the one that schedules.
"""
