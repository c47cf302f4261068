"""Is this machine ready, and if not, why? Its face is the command `bytesched doctor`."""
