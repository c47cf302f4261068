"""Waves: several batches under way at once, staggered, so that what one leaves idle another uses.

After Wavelet (Wang et al., MLSys 2021). ``TickTock`` overlaps the waves of one rank, data-parallel.
In ``ModelWaves`` every rank is a wave, and the stages of the model come to it one by one.
"""

from __future__ import annotations

from .model_waves import ModelWaves
from .state import ActivationMemory
from .ticktock import TickTock

__all__ = ["ActivationMemory", "ModelWaves", "TickTock"]
