"""What the doctor finds."""

from __future__ import annotations

from bytesched.doctor.checks import Check


def only(found: list[Check], name: str) -> Check:
    [check] = [check for check in found if check.name == name]
    return check
