"""The lab: rates, addresses, shaping, and that nothing of it is ever left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytesched.errors import ConfigError
from bytesched.lab.hosts import Lab, LabError, parse_rate

RECEIVER = """
import socket
server = socket.create_server(("", 5001))
print("listening", flush=True)
peer, _ = server.accept()
received = 0
while data := peer.recv(1 << 20):
    received += len(data)
print(received)
"""
SENT_BYTES = 1 << 22
SENDER = f"""
import socket, sys
with socket.create_connection((sys.argv[1], 5001), timeout=float(sys.argv[2])) as peer:
    peer.sendall(bytes({SENT_BYTES}))
"""
ORPHAN = """
import subprocess, sys, time
from bytesched.lab.hosts import Lab
lab = Lab(2).__enter__()
processes = [lab.launch(host, ["sleep", "60"]) for host in range(2)]
print(*(process.pid for process in processes), *(anchor.pid for anchor in lab._anchors))
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(2, "100mbit") as lab:
        if not lab.shaped:
            pytest.skip(f"no network namespaces here: {lab.reason}")
        yield lab


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline_s, f"still running: {pids}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("1gbit", 10**9),
        ("2.5Gbit/s", 2_500_000_000),
        ("250mbit", 250_000_000),
        (" 900 kbitps ", 900_000),
        ("100000bit", 100_000),
    ],
)
def test_parse_rate(text: str, bits_per_s: int) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    "text", ["", "1", "fast", "1gb", "-1gbit", "0gbit", "10bit", "1e3mbit", "99999999999999gbit"]
)
def test_a_wrong_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 1gbit"):
        parse_rate(text)


@pytest.mark.parametrize("hosts", [0, -1, 65])
def test_a_wrong_number_of_hosts_is_refused(hosts: int) -> None:
    with pytest.raises(ConfigError, match="1 to 64 hosts"):
        Lab(hosts)


def test_without_the_tools_the_hosts_are_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytesched.lab.hosts.shutil.which", lambda tool: None)
    with Lab(2) as lab:
        assert not lab.shaped
        assert lab.addresses == ["127.0.0.1", "127.0.0.1"]
        assert lab.interface == "lo"
        assert "not installed: ip, tc" in lab.reason
        process = lab.launch(1, ["echo", "here"], stdout=subprocess.PIPE)
        assert process.communicate()[0] == "here\n"
    with pytest.raises(LabError, match="cannot build emulated hosts"), Lab(2, required=True):
        pass


@pytest.mark.lab
def test_hosts_have_addresses_and_environment_of_their_own(lab: Lab) -> None:
    script = 'echo "$NAME"; ip -4 -o addr show dev eth0; cat /proc/sys/kernel/hostname'
    for host, address in enumerate(lab.addresses):
        process = lab.launch(
            host, ["sh", "-c", script], {"NAME": f"a b{host}"}, stdout=subprocess.PIPE
        )
        output = process.communicate()[0]
        assert process.returncode == 0
        assert output.startswith(f"a b{host}\n")
        assert f" {address}/24 " in output
        assert output.endswith(f"\n{address}\n")
    with pytest.raises(LabError, match="hosts 0 to 1"):
        lab.launch(2, ["true"])


def through(lab: Lab, anchor: subprocess.Popen[str], interface: str) -> tuple[str, int]:
    """What holds up packets that leave by `interface`, to which rate, and how many bytes did."""
    show = ["tc", "-json", "-statistics", "qdisc", "show", "dev", interface]
    shown = subprocess.run([*lab._enter(anchor), *show], capture_output=True, check=True)
    [root] = [rule for rule in json.loads(shown.stdout) if rule.get("root")]
    return f"{root['kind']} {8 * root['options']['rate']}", root["bytes"]


@pytest.mark.lab
def test_the_link_has_the_rate(lab: Lab) -> None:
    send = [sys.executable, "-c", SENDER, lab.addresses[0]]
    with lab.launch(0, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        assert lab.launch(1, [*send, "20"]).wait(timeout=30) == 0
        assert int(receiver.stdout.read()) == SENT_BYTES
    assert lab._switch is not None
    receiving, sending = lab._anchors
    on_the_way = [through(lab, sending, "eth0"), through(lab, lab._switch, "host0")]
    # There are acknowledgements alone.
    on_the_way_back = [through(lab, receiving, "eth0"), through(lab, lab._switch, "host1")]
    assert {rate for rate, _ in on_the_way + on_the_way_back} == {"tbf 100000000"}
    assert all(sent_bytes > SENT_BYTES for _, sent_bytes in on_the_way)
    assert all(sent_bytes < SENT_BYTES for _, sent_bytes in on_the_way_back)


@pytest.mark.lab
def test_closing_kills_what_runs_even_if_it_is_stopped(lab: Lab) -> None:
    runs = lab.launch(0, ["sleep", "60"])
    stopped = lab.launch(1, ["sh", "-c", "kill -STOP $$"])
    anchors = [anchor.pid for anchor in lab._anchors]
    lab.close()
    assert runs.returncode == stopped.returncode == -9
    wait_until_gone(anchors)
    assert not lab.shaped


@pytest.mark.lab
def test_nothing_is_left_when_the_owner_is_killed(lab: Lab) -> None:
    owner = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as lines:
        pids = [int(pid) for pid in lines.readline().split()]
    assert len(pids) == 4
    assert all(map(is_running, pids))
    owner.kill()
    owner.wait()
    wait_until_gone(pids)
