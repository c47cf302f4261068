"""A model whose stages visit every rank."""

from __future__ import annotations

from .model_waves import ModelWaves

__all__ = ["ModelWaves"]
