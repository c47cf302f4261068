"""Settings that somebody gave and that do nothing where they were given: said, by name."""

from __future__ import annotations

import logging
from collections.abc import Collection

from bytesched.config import Config

__all__ = ["warn_of_unused"]

log = logging.getLogger("bytesched")


def warn_of_unused(
    config: Config, used: Collection[str], what: str, *, origins: Collection[str] = ()
) -> None:
    """Logs the fields that are not at their default and that ``what`` does not use.

    Args:
        used: the fields that it does use.
        origins: where they were given for it, such as "code"; elsewhere they may be meant for
            others. Empty: everywhere counts.
    """
    given = [
        f"{name} = {value!r} ({origin})"
        for name, value, origin in config.explain()
        if name not in used
        and value != getattr(Config, name)
        and (not origins or origin in origins)
    ]
    if given:
        log.warning("%s does not use %s", what, ", ".join(given))
