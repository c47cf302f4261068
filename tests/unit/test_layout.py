"""Each file of some packages has the unit test of its name, in the folder of its package."""

from __future__ import annotations

import pytest
from paths import ROOT

#: files without one: what is tested where they are used, and what is a type alone
WITHOUT = {
    # Protocols, which have nothing that could run.
    "engine/phase.py",
    # Tested with the sessions of tests/unit/engine and tests/procs.
    "engine/by_hand.py",
    "engine/running.py",
    "engine/warming.py",
    # Tested with ranks, in tests/procs.
    "routes/split/collectives.py",
    "routes/split/row_transport.py",
    "zero1/full_gradients.py",
    "zero1/optimizer_shards.py",
    "zero1/sharded_updates.py",
    "zero1/sharding.py",
    "zero1/unstepped.py",
}


@pytest.mark.parametrize("package", ["engine", "queries", "routes", "zero1"])
def test_each_file_has_its_unit_test(package: str) -> None:
    plugins, tests = ROOT / "plugins", ROOT / "tests" / "unit"
    files = {
        path.relative_to(plugins)
        for path in (plugins / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    without = {
        file.as_posix()
        for file in files
        if not (tests / file.with_name(f"test_{file.name}")).exists()
    }
    assert without == {name for name in WITHOUT if name.startswith(f"{package}/")}
