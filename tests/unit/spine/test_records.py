"""Dataclasses as JSON: whole again, or refused by the name of a field."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bytesched.records import from_json, to_json


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...]
    options: dict[str, str]


@dataclass(frozen=True)
class Outer:
    name: str
    rate: float | None
    inner: tuple[Inner, ...]
    content: object
    flag: bool = False


OUTER = Outer("a", 1.5, (Inner((1, 2), {"x": "y"}), Inner((), {})), {"any": [1, None]}, True)


def test_a_record_is_whole_again() -> None:
    assert from_json(Outer, to_json(OUTER)) == OUTER
    short = '{"name": "a", "rate": 2, "inner": [], "content": null}'
    found = from_json(Outer, short)
    assert found == Outer("a", 2.0, (), None)
    assert type(found.rate) is float


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rate": 1, "inner": [], "content": 1}', "Outer needs 'name'"),
        ('{"name": "a", "rate": 1, "inner": [], "content": 1, "more": 1}', "Outer has no 'more'"),
        ('{"name": 1, "rate": 1, "inner": [], "content": 1}', "Outer.name is 1, not str"),
        ('{"name": "a", "rate": true, "inner": [], "content": 1}', "Outer.rate is True, not float"),
        ('{"name": "a", "rate": 1, "inner": {}, "content": 1}', r"Outer\.inner is \{\}, not tuple"),
        (
            '{"name": "a", "rate": 1, "inner": [{"sizes": ["b"], "options": {}}], "content": 1}',
            r"Outer\.inner\[0\]\.sizes\[0\] is 'b', not int",
        ),
        ("[]", r"Outer is \[\], not Outer"),
        ("{", "Expecting"),
        ("[" * 100_000, "no valid JSON"),
    ],
)
def test_what_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_json(Outer, text)
