"""Jobs of several ranks on one machine, each a script under `bytesched run --share`."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranks import new_store
from warm_python import warm_python

from bytesched.environment import child_environment

TIMEOUT_S = 100.0


class SharedJob:
    def __init__(self, script: Path, ranks: int, options: Sequence[str], arguments: Sequence[str]):
        self._store = new_store()
        self.processes = [
            subprocess.Popen(
                [warm_python(), "-m", "bytesched", "run", *options, str(script), *arguments],
                env=child_environment(
                    {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(self._store.port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "BYTESCHED_PARTITION_BYTES": "256",
                        "BYTESCHED_CREDIT_BYTES": "512",
                    }
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def found(self) -> list[dict[str, Any]]:
        """What each rank has printed at its end, a JSON object in its last line."""
        ended = [process.communicate(timeout=TIMEOUT_S) for process in self.processes]
        for process, (_, errors) in zip(self.processes, ended, strict=True):
            assert process.returncode == 0, errors
        return [json.loads(output.splitlines()[-1]) for output, _ in ended]

    def wait_for(self, line: str) -> None:
        """Returns when rank 0 has printed that line."""
        output = self.processes[0].stdout
        assert output is not None
        assert any(printed.strip() == line for printed in output), line

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextmanager
def sharing(
    script: Path, *jobs: int, options: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Iterator[list[SharedJob]]:
    """Jobs that run at once and take turns: one for each number of ranks."""
    options = ["--share", f"test-{uuid.uuid4().hex}", *options]
    started: list[SharedJob] = []
    try:
        for ranks in jobs:
            started.append(SharedJob(script, ranks, options, arguments))
        yield started
    finally:
        for job in started:
            job.kill()
