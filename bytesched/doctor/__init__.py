"""Is this machine ready, and if not, why? Its face is the command `bytesched doctor`."""

from __future__ import annotations

from bytesched.doctor.checks import Check, Status

__all__ = ["Check", "Status"]
