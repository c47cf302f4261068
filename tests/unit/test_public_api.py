"""The public surface: names, signatures, and what they do before any framework is there."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
from collections.abc import Callable

import pytest
from public import ELSEWHERE, PUBLIC

import bytesched


def test_every_public_name_exists_and_nothing_else_does() -> None:
    assert list(bytesched.__all__) == sorted(bytesched.__all__)
    submodules = {name for name, value in vars(bytesched).items() if inspect.ismodule(value)}
    private = {name for name in vars(bytesched) if name.startswith("_")}
    types = {"TYPE_CHECKING", "TypeVar", "overload", "ClassT", "OptimizerT", "WrappedT"}
    helpers = {"annotations", *types}
    surface = set(vars(bytesched)) - submodules - private - helpers
    assert surface | {"__version__"} == set(bytesched.__all__)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "wrap",
            ["optimizer", "model", "kvstore", "groups", "accumulate", "micro_batches", "fields"],
        ),
        ("explain_optimizer", ["optimizer"]),
        ("flush", ["x"]),
        ("separable", ["cls"]),
        ("sharded_state", ["optimizer"]),
        ("unwrap", ["x"]),
        ("stats", ["x"]),
    ],
)
def test_signature(name: str, parameters: list[str]) -> None:
    function = getattr(bytesched, name)
    assert list(inspect.signature(function).parameters) == parameters
    assert function.__doc__


def test_no_public_name_is_lost() -> None:
    for module in PUBLIC.keys() - ELSEWHERE:
        found = importlib.import_module(module)
        assert [name for name in PUBLIC[module] if not hasattr(found, name)] == [], module


def test_typing_marker_is_there() -> None:
    folder = importlib.resources.files(bytesched)
    assert folder.joinpath("py.typed").is_file()


def test_without_torch_the_message_says_what_to_install(python: Callable[..., str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import bytesched\n"
        "try:\n"
        "    bytesched.wrap(object(), object())\n"
        "except bytesched.PluginError as error:\n"
        "    print(error)\n"
    )
    assert "pip install 'bytesched[torch]'" in python("-c", code)
