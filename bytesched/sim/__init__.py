"""What systems would take on a cluster that is not there: real decisions, modelled links."""
