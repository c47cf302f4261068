"""What ranks send each other while they train, and what is not accepted from a network."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bytesched import PeerLost, PluginError
from bytesched.errors import BytesschedError, SchedulerTimeout
from bytesched.plugins.zero1.rank_calls import packed, packed_error, unpacked


def test_state_of_an_optimizer_arrives_as_it_was() -> None:
    entry: dict[str, Any] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.ones(2, dtype=torch.bfloat16),
        "lr": 0.5,
    }
    found = unpacked(packed({4: entry, 7: {"on": True, "names": ("a", None)}}))
    assert found[7] == {"on": True, "names": ("a", None)}
    assert found[4]["lr"] == 0.5
    assert found[4]["exp_avg"].dtype is torch.bfloat16
    assert torch.equal(found[4]["step"], entry["step"])


@pytest.mark.parametrize("kind", [PeerLost, SchedulerTimeout, PluginError, BytesschedError])
def test_an_error_keeps_its_kind_and_its_words(kind: type[BytesschedError]) -> None:
    with pytest.raises(BytesschedError, match="rank 1 is late") as raised:
        unpacked(packed_error(kind("rank 1 is late")))
    assert type(raised.value) is kind


def test_nothing_that_comes_is_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (f"{tmp_path}/made",)

    buffer = io.BytesIO()
    torch.save(("", Hostile()), buffer)
    with pytest.raises(PluginError, match="not accepted from a network"):
        unpacked(buffer.getvalue())
    assert not os.path.exists(f"{tmp_path}/made")
