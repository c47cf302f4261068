"""The version, for those who must not import the front of the package."""

__version__ = "0.2.0"
"""The version of the package, by Semantic Versioning."""
