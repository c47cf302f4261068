"""Each file of some packages has the unit test of its name, in the folder of its package."""

from __future__ import annotations

import pytest
from paths import ROOT


@pytest.mark.parametrize("package", ["engine", "queries", "routes", "zero1"])
def test_each_file_has_its_unit_test(package: str) -> None:
    plugins, tests = ROOT / "plugins", ROOT / "tests" / "unit"
    files = [
        path.relative_to(plugins)
        for path in sorted((plugins / package).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    assert files, f"plugins/{package} has no file"
    wanted = {file: file.with_name(f"test_{file.name}") for file in files}
    missing = [
        f"plugins/{file.as_posix()} has no tests/unit/{test.as_posix()}"
        for file, test in wanted.items()
        if not (tests / test).exists()
    ]
    assert not missing, "\n".join(missing)
