"""Two emulated hosts, plain and scheduled, in a minute."""
