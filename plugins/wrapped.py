"""What stands behind a wrapped object."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Wrapped"]


class Wrapped(Protocol):
    """A session, whatever carries it."""

    @property
    def root(self) -> Any:
        """What the user may name instead of the wrapped object: the model."""

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""

    def flush(self) -> None:
        """Everything that was started is complete, and everything armed is applied."""

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank."""

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off and stops every thread; does not flush. Idempotent."""

    def stats(self) -> dict[str, int | float | str]:
        """Figures, flat, with units in the names."""
