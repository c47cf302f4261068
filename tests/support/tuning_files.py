"""Tunings as they are remembered."""

from __future__ import annotations

from bytesched.tunable import Setting
from bytesched.tuning.file import Fingerprint, Trial, TuningFile

MIB = 1 << 20
FINGERPRINT = Fingerprint(
    "gloo", (2, 2), "cpu", "torch 2.13.0", "0.1.0", "abc", 40 * MIB, 1.2e8, 4e-4
)
UNTUNED = Setting(2 * MIB, 4 * MIB)
TUNED = Setting(MIB, 3 * MIB)
DONE = TuningFile(
    FINGERPRINT,
    UNTUNED,
    TUNED,
    (Trial(TUNED, "search", 400.0, (399.0, 401.0)), Trial(UNTUNED, "search", float("nan"), ())),
    120,
    400.0,
    440.0,
)
