"""Two emulated hosts, plain and scheduled, in two minutes: a recipe of the bench."""
