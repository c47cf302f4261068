"""The configuration: one frozen `Config`, taken from code, environment, file and defaults.

A value comes from the first place that names it: an argument in the code, a `BYTESCHED_<FIELD>`
variable (the command line sets those), `bytesched.toml` in the working directory, the default.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypedDict, TypeVar

from bytesched.environment import PREFIX, own_variables, rank_view, set_variables
from bytesched.errors import ConfigError
from bytesched.grid import Cell, refusal
from bytesched.share.tickets import parse_share
from bytesched.values import (
    AUTOMATIC,
    nearest,
    one_of,
    parse_flag,
    parse_name,
    parse_optional_flag,
    parse_path,
    parse_size,
    parse_timeout,
    shown,
    whole_number,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "bytesched.toml"
#: below, there would be no time to compare what was found with the untuned setting
LEAST_TUNE_STEPS = 40

_COMMAND_LINE = "command line"

_log = logging.getLogger("bytesched")

#: fields that were set on the command line of this process
_on_command_line: set[str] = set()


class ConfigFields(TypedDict, total=False):
    """The fields of `Config` as keyword arguments, in the forms that users write."""

    enabled: bool
    policy: str
    partition_bytes: int | str
    credit_bytes: int | str
    compression: str
    cross_barrier: bool
    guard: bool
    split: str
    hierarchy: str
    shard: bool
    share: str
    find_unused_parameters: bool | None
    timeout_s: float
    timeline: str
    figures: str
    tune: bool
    tune_steps: int
    tune_file: str
    log_level: str


ValueT = TypeVar("ValueT")


def _field(default: ValueT, parse: Callable[[object], ValueT]) -> ValueT:
    """A field, and what brings the forms that users write to its type."""
    found: ValueT = dataclasses.field(default=default, metadata={"parse": parse})
    return found


@dataclass(frozen=True)
class Config:
    """What a user can set. Values are checked and brought to their type on construction."""

    enabled: bool = _field(True, parse_flag)
    """Off (`BYTESCHED_ENABLED=0`): the script runs as if `wrap` were not there."""
    policy: str = _field("priority", parse_name)
    """Which ready chunk goes first. `priority`: what the next forward pass needs first. `fifo`: the
    order of backward. `prophet`: planned as `priority`, with several chunks in a row where earlier
    iterations show that nothing more urgent can come meanwhile."""
    partition_bytes: int = _field(AUTOMATIC, parse_size)
    """Size of the chunks, such as `512KiB` or `1MB`; 0: one that suits most links."""
    credit_bytes: int = _field(AUTOMATIC, parse_size)
    """Of a store: most bytes in flight. Else how far ahead of the link the plan decides. 0: chosen
    together with `partition_bytes`."""
    compression: str = _field("none", one_of("none", "bf16", "fp16"))
    """Of real numbers on the wire: `none`, or `bf16` or `fp16`, like DDP's compression hooks."""
    cross_barrier: bool = _field(True, parse_flag)
    """Off: schedule inside the backward pass, update the whole model in `step()`."""
    guard: bool = _field(True, parse_flag)
    """Iterations take turns with plain DDP's, at growing distances, and where bytesched is not
    faster the model is left to DDP; a plan alone (DDP), and not with `tune`. Off: it never is."""
    split: str = _field("auto", one_of("auto", "on", "off"))
    """Send each gradient in two halves, a reduce-scatter and an all-gather, so that norms of all
    gradients wait for half of the bytes: a DDP of two ranks over Gloo on CPUs. `auto`: once both
    ask for norms; `on` or `off`."""
    hierarchy: str = _field("auto", one_of("auto", "on", "off"))
    """Sum within hosts first and then between them, if hosts have several ranks each (DDP on Gloo).
    `auto`: if a trial on the link shows that it is faster; `on` or `off`."""
    shard: bool = _field(False, parse_flag)
    """Each rank updates a part of the model, holds the optimizer's state for that part only, and
    sends the new parameters to the other ranks. For a model in DDP, on Gloo or NCCL."""
    share: str = _field("", parse_share)
    """Jobs of one machine with the same name here take turns on each device: one computes while
    gradients of the others travel. A name, or a folder in which they meet; empty: no turns."""
    find_unused_parameters: bool | None = _field(None, parse_optional_flag)
    """Whether parameters may stay out of the loss; None: as given to DDP, or learned at once."""
    timeout_s: float = _field(1800.0, parse_timeout)
    """Longest time that anything waits before it raises an error. For a model in DDP, or a module
    whose ranks are those of `torch.distributed`, the timeout of its group where nothing else is
    said."""
    timeline: str = _field("", parse_path)
    """Folder for one `rank<n>.trace.json` per rank; empty: no trace."""
    figures: str = _field("", parse_path)
    """Folder for one `rank<n>.figures.json` per rank: a list with the figures of each model that
    has ended; empty: no files."""
    tune: bool = _field(False, parse_flag)
    """Look for the fastest sizes during training, and remember them for this cluster."""
    tune_steps: int = _field(150, whole_number(LEAST_TUNE_STEPS, 10**6))
    """Most steps of one search; a new one starts when the cluster has changed for good."""
    tune_file: str = _field("", parse_path)
    """File that remembers the result; empty: one per cluster, in the user's cache folder."""
    log_level: str = _field("INFO", one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
    """Level of the logger `bytesched`."""

    _origins: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        if AUTOMATIC < self.credit_bytes < self.partition_bytes:
            raise ConfigError(
                f"credit_bytes = {self.credit_bytes} is below partition_bytes = "
                f"{self.partition_bytes}, so no full partition could ever be sent: raise "
                f"credit_bytes to at least {self.partition_bytes}, or lower partition_bytes"
            )
        if self.shard and self.split == "off":
            raise ConfigError(
                "shard = True and split = 'off': a sharded update sends sums and parameters in two "
                "halves; leave split as it is"
            )
        if refused := refusal(self.cell):
            raise refused

    @property
    def cell(self) -> Cell:
        """The way for gradients that is asked for."""
        carried = "sharded" if self.shard else "split" if self.split == "on" else "whole"
        levels = "two levels" if self.hierarchy == "on" else "flat"
        return Cell(carried, levels, "tuned" if self.tune else "given")

    @classmethod
    def load(cls, **fields: object) -> Config:
        """Return the configuration in force, each value from the first place that names it.

        Raises `ConfigError` for an unknown name or an impossible value, with where it stood.
        """
        _refuse_unknown_variables()
        layers: tuple[tuple[Callable[[str], str], Mapping[str, object]], ...] = (
            (lambda _: f"file {FILE_NAME}", _from_file(Path(FILE_NAME))),
            (_origin_of_variable, _from_environment()),
            (lambda _: "code", fields),
        )
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        hidden: list[str] = []
        for origin_of, layer in layers:
            for name, raw in layer.items():
                origin = origin_of(name)
                value = _checked(name, raw, origin)
                if origin == "code" and values.get(name, value) != value:
                    hidden.append(
                        f"{name} = {value!r} overrides {values[name]!r} ({origins[name]})"
                    )
                values[name], origins[name] = value, origin
        try:
            config = cls(**values)
        except ConfigError as error:
            # Each value is possible alone; these are not together.
            given = [
                f"{n} is from {origin}" for n, origin in origins.items() if f"{n} = " in str(error)
            ]
            raise ConfigError(f"{error} ({', '.join(given)})") from None
        object.__setattr__(config, "_origins", origins)
        if hidden and rank_view().rank == 0:
            _log.info("arguments in the code come first: %s", "; ".join(hidden))
        return config

    def explain(self) -> list[tuple[str, object, str]]:
        """Return (field, value, origin) for every field, in the order of definition."""
        return [(name, getattr(self, name), self.origin(name)) for name in FIELDS]

    def waiting(self, timeout_s: float) -> Config:
        """Return the same with ``timeout_s`` where no place says how long anything waits."""
        if self.origin("timeout_s") != "default":
            return self
        config = dataclasses.replace(self, timeout_s=timeout_s)
        object.__setattr__(config, "_origins", {**self._origins, "timeout_s": "default"})
        return config

    def origin(self, name: str) -> str:
        """Return where the value of a field is from."""
        is_default = getattr(self, name) == FIELDS[name].default
        return self._origins.get(name, "default" if is_default else "code")


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def warn_of_unused(
    config: Config, used: Collection[str], what: str, *, origins: Collection[str] = ()
) -> None:
    """Log the fields that are not at their default and that ``what`` does not use.

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
        _log.warning("%s does not use %s", what, ", ".join(given))


def set_on_command_line(texts: Mapping[str, str]) -> None:
    """Give fields a value that comes before environment and file, also in child processes.

    Raises `ConfigError` for an unknown name or an impossible value, and sets nothing then.
    """
    for name, text in texts.items():
        _checked(name, text, _COMMAND_LINE)
    set_variables({variable(name): text for name, text in texts.items()})
    _on_command_line.update(texts)


def variable(name: str) -> str:
    """Return the environment variable that sets a field."""
    return PREFIX + name.upper()


def _checked(name: str, value: object, origin: str = "code") -> Any:
    if name in GONE:
        raise ConfigError(f"{name} = {shown(value)} ({origin}) is gone: {GONE[name]}")
    if name not in FIELDS:
        raise ConfigError(f"there is no field {shown(name)} ({origin}){nearest(name, FIELDS)}")
    try:
        return FIELDS[name].metadata["parse"](value)
    except ValueError as error:
        raise ConfigError(f"{name} = {shown(value)} ({origin}): {error}") from None


def _origin_of_variable(name: str) -> str:
    return _COMMAND_LINE if name in _on_command_line else f"environment {variable(name)}"


#: of earlier versions
GONE: Final = {
    "order": "all ranks keep to one planned order; leave it out",
    "tune_space": "set partition_bytes or credit_bytes, and the other is looked for",
}


def _refuse_unknown_variables() -> None:
    known = [variable(name) for name in FIELDS]
    for name, text in own_variables().items():
        field = name.removeprefix(PREFIX).lower()
        if field in GONE:
            _checked(field, text, "environment")
        if name not in known:
            raise ConfigError(
                f"there is no field for {name} = {shown(text)} (environment){nearest(name, known)}"
            )


def _from_environment() -> dict[str, object]:
    given = own_variables()
    return {name: given[variable(name)] for name in FIELDS if variable(name) in given}


def _from_file(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        return dict(tomllib.loads(text))
    except RecursionError:
        raise ConfigError(f"{path} is no valid TOML: nested too deeply") from None
    except ValueError as error:
        # Also of numbers that are too long for Python to read.
        raise ConfigError(f"{path} is no valid TOML: {error}") from error
