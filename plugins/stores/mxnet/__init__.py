"""MXNet's own store and Gluon trainer; its engine is the gate."""
