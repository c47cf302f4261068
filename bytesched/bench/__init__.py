"""What is compared, what every rank gets, and what is made of it: `bytesched bench`."""

from __future__ import annotations

from bytesched.bench.profile import (
    LayerProfile,
    Profile,
    load_profile,
    parse_profile,
    profiles_in,
    read_profile,
    shipped_profiles,
)
from bytesched.bench.specification import Specification
from bytesched.bench.systems import System

__all__ = [
    "LayerProfile",
    "Profile",
    "Specification",
    "System",
    "load_profile",
    "parse_profile",
    "profiles_in",
    "read_profile",
    "shipped_profiles",
]
