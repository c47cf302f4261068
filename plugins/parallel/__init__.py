"""Plans of `bytesched.ir` on real ranks: data, tensor and pipeline parallel."""

from .planned import Planned
from .styles import parallel_styles

__all__ = ["Planned", "parallel_styles"]
