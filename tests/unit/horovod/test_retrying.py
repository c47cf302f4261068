"""A call that is tried again in the background leaves no thread, whenever its process ends."""

import subprocess
import sys
import textwrap
import threading

import pytest

TIMEOUT_S = 250.0
PRELUDE = """
import atexit, threading
from bytesched.plugins.horovod.retrying import retry_in_background

attempts = []
atexit.register(lambda: print([t.name for t in threading.enumerate()], bool(attempts)))

def begin(reached=threading.Event()):
    def attempt():
        attempts.append(1)
        reached.set()
        return False
    retry_in_background(attempt, name="again", nap_s=0.001, timeout_s=30.0)
    return reached
"""


def test_it_is_tried_until_it_succeeds() -> None:
    from bytesched.plugins.horovod.retrying import retry_in_background

    attempts, done = iter([False, False, True]), threading.Event()

    def attempt() -> bool:
        succeeds = next(attempts)
        if succeeds:
            done.set()
        return succeeds

    retry_in_background(attempt, name="again", nap_s=0.0, timeout_s=TIMEOUT_S)
    assert done.wait(TIMEOUT_S)
    for thread in threading.enumerate():
        if thread.name == "again":
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    assert next(attempts, None) is None


@pytest.mark.parametrize(
    ("begins", "tried"),
    [("begin().wait(30.0)", True), ("atexit.register(begin)", False)],
    ids=["before_the_end", "at_the_end"],
)
@pytest.mark.nightly
def test_no_thread_is_left_at_exit(begins: str, tried: bool) -> None:
    program = textwrap.dedent(PRELUDE) + begins
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.stdout == f"['MainThread'] {tried}\n", ended.stderr
