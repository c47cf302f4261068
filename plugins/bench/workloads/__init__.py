"""Models to measure with: real, and emulated at a profile."""
