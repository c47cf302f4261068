"""Plans of tensor parallelism of `bytesched.ir`, for `parallelize_module` of torch."""

from .styles import parallel_styles

__all__ = ["parallel_styles"]
