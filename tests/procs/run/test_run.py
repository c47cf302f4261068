"""A script under `bytesched run` behaves as one that the interpreter runs by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from bytesched.environment import child_environment

OURS = ["-m", "bytesched", "run"]
TIMEOUT_S = 250.0

Ended = tuple[int, str, str]


def run(
    command: Sequence[str],
    folder: Path,
    *,
    flags: Sequence[str] = (),
    stdin: str = "",
    **variables: str | None,
) -> Ended:
    done = subprocess.run(
        [sys.executable, *flags, *command],
        cwd=folder,
        env=child_environment({"PYTHONPATH": None, **variables}),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def both(command: Sequence[str], folder: Path, stdin: str = "", flags: Sequence[str] = ()) -> Ended:
    """How a script ends, which is the same way under `bytesched run`."""
    plain = run(command, folder, flags=flags, stdin=stdin)
    assert run([*OURS, *command], folder, flags=flags, stdin=stdin) == plain
    return plain


def write(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


ENDINGS = {
    "falls off": ("pass", 0),
    "exit": ("import sys; sys.exit()", 0),
    "exit with a number": ("import sys; sys.exit(3)", 3),
    "exit with a text": ("import sys; sys.exit('no data')", 1),
    "exit in a function": ("def main():\n    raise SystemExit(4)\nmain()", 4),
    "hard exit": ("import os; print('lost', end=''); os._exit(7)", 7),
    "error": ("def main():\n    return 1 / 0\n\nmain()", 1),
    "chained errors": (
        "try:\n    {}['key']\nexcept KeyError as error:\n    raise RuntimeError('new') from error",
        1,
    ),
    "error in an error": ("try:\n    1 / 0\nfinally:\n    undefined", 1),
    "own excepthook": (
        """
        import sys, traceback
        def hook(kind, error, where):
            print(kind.__name__, len(traceback.extract_tb(where)), where is error.__traceback__)
        sys.excepthook = hook
        [][1]
        """,
        1,
    ),
    "last error": (
        """
        import atexit, sys, traceback
        def report():
            print(len(traceback.extract_tb(sys.last_traceback)))
            print(sys.excepthook is sys.__excepthook__)
        atexit.register(report)
        [][1]
        """,
        1,
    ),
    "syntax error": ("x = (", 1),
    "import error": ("import nothing.of.this.name", 1),
    "interrupt": ("print('on'); raise KeyboardInterrupt", -signal.SIGINT),
    "SIGINT": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "SIGTERM": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGINT with a finally": (
        "import os, signal\ntry:\n    os.kill(os.getpid(), 2)\nfinally:\n    print('saved')",
        -signal.SIGINT,
    ),
    "SIGTERM with a handler": (
        """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        5,
    ),
    "closed pipe": ("import os\nos.close(1)\nprint('x', flush=True)", 1),
    "thread outlives the script": (
        """
        import pickle, threading
        class Item: pass
        def late():
            threading.main_thread().join()
            print(type(pickle.loads(pickle.dumps(Item()))).__module__)
        threading.Thread(target=late).start()
        """,
        0,
    ),
    "atexit": (
        """
        import atexit, pickle
        class Item: pass
        atexit.register(lambda: print(__name__, pickle.dumps(Item())))
        """,
        0,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.one_in(3)
def test_ends_the_same(tmp_path: Path, name: str) -> None:
    source, code = ENDINGS[name]
    write(tmp_path, source)
    ended = both(["script.py"], tmp_path)
    assert ended[0] == code, ended
    assert "bytesched" not in ended[2]


SURROUNDINGS = """
import inspect, pickle, sys
print(sys.argv, sys.path[0], __name__, __file__, __package__, __cached__, type(__loader__))
print(sorted(globals()), type(__builtins__), sys.modules["__main__"].__dict__ is globals())
print(__spec__ and __spec__.name, sys.flags, inspect.currentframe().f_code.co_filename)
class Item:
    def method(self, x: int): pass
print(Item.method.__annotations__)
print(pickle.dumps(Item()), inspect.getsource(Item), __loader__.name)
print(sys.stdin.read())
import sibling
"""


@pytest.mark.parametrize(
    "path", ["script.py", "./script.py", "../code/script.py", "sub/../script.py", "link.py"]
)
@pytest.mark.one_in(5)
def test_sees_the_same(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "code"
    write(folder, SURROUNDINGS)
    write(folder, "print('sibling', __name__)", "sibling.py")
    (folder / "sub").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "link.py").symlink_to("script.py")
    arguments = ["--", "--policy", "own", "--", "-m", "--off"]
    code, said, _ = both([path, *arguments], folder, stdin="some data")
    assert code == 0
    for part in (str(arguments)[1:], "some data", "sibling"):
        assert part in said
    (elsewhere / "link.py").symlink_to(folder / path)
    for other in (str(folder / path), "link.py"):
        assert both([other, *arguments], elsewhere)[0] == 0


@pytest.mark.parametrize("flags", [["-P"], ["-O", "-W", "error"], ["-I"], ["-X", "utf8"]])
def test_sees_the_same_flags(tmp_path: Path, flags: list[str]) -> None:
    write(tmp_path, SURROUNDINGS)
    if flags == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("this Python has no -P")
    both(["script.py"], tmp_path, flags=flags)


def test_runs_modules_and_packages(tmp_path: Path) -> None:
    write(tmp_path, SURROUNDINGS, "alone.py")
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, "print(__package__); from . import sibling; 1 / 0", "package/__main__.py")
    write(tmp_path, SURROUNDINGS.replace("import s", "from . import s"), "package/part.py")
    write(tmp_path, "print('sibling', __name__)", "package/sibling.py")
    write(tmp_path, "print('sibling', __name__)", "sibling.py")
    for module, code in (("alone", 0), ("package.part", 0), ("package", 1), ("missing", 1)):
        for arguments in (["--off", "x"], ["--", "--off"]):
            assert both(["-m", module, *arguments], tmp_path)[0] == code


def test_two_dashes_before_the_script_are_ours(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print(sys.argv)")
    ended = run([*OURS, "--policy", "fifo", "--", "script.py", "--", "x"], tmp_path)
    assert ended == (0, "['script.py', '--', 'x']\n", "")


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.one_in(3)
def test_child_processes(tmp_path: Path, method: str, how: str) -> None:
    """Classes and functions of the script reach its children, whichever way they are started."""
    write(
        tmp_path,
        """
        import multiprocessing, sys
        class Item:
            def __init__(self, value): self.value = value
        def work(item):
            return Item(item.value + 1), __name__, sys.argv
        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
                for item, *rest in pool.map(work, [Item(1), Item(2)]):
                    print(type(item) is Item, item.value, *rest)
        """,
    )
    command = ["script.py"] if how == "script" else ["-m", "script"]
    code, said, _ = both([*command, method], tmp_path)
    assert code == 0
    assert said.count("True") == 2


def test_command_on_the_path(tmp_path: Path) -> None:
    write(tmp_path, SURROUNDINGS)
    write(tmp_path, "", "sibling.py")
    command = str(Path(sys.executable).with_name("bytesched"))
    for script in (["script.py", "x"], ["-m", "script", "x"]):
        plain = run(script, tmp_path)
        assert plain[0] == 0
        assert run([command, "run", *script], tmp_path) == plain


PRINT_SETTINGS = """
import bytesched
for name, value, origin in bytesched.Config.load().explain():
    print(name, value, origin, sep="|")
"""


def settings(ended: Ended) -> dict[str, tuple[str, str]]:
    assert ended[0] == 0, ended
    rows = [line.split("|") for line in ended[1].splitlines()]
    return {name: (value, origin) for name, value, origin in rows}


@pytest.mark.parametrize("how", ["script", "module"])
def test_copies_that_the_script_starts_are_watched(tmp_path: Path, how: str) -> None:
    """As trainers start the other ranks; from another folder, without the way that led to us."""
    write(
        tmp_path,
        """
        import os, subprocess, sys
        class Item: pass
        print(sys.argv[1:], __file__, __name__, sys.path[0], sys.flags.dev_mode, Item.__module__)
        watched = hasattr(subprocess.Popen.__init__, "__wrapped__")
        if len(sys.argv) == 1:
            how = ["-m", __spec__.name] if __spec__ else [os.path.abspath(sys.argv[0])]
            os.mkdir("elsewhere")
            place = None if __spec__ else "elsewhere"
            command = [sys.executable, "-X", "dev", *how, "-m", "copy"]
            child = subprocess.run(command, cwd=place, check=False)
            os.rmdir("elsewhere")
            print(child.returncode, child.args == command, file=sys.stderr)
        else:
            print(watched, file=sys.stderr)
            sys.exit(7)
        """,
    )
    command = ["script.py"] if how == "script" else ["-m", "script"]
    plain, ours = run(command, tmp_path), run([*OURS, *command], tmp_path)
    assert ours[:2] == plain[:2]
    assert plain[2] == "False\n7 True\n"
    assert ours[2] == "True\n7 True\n"


def test_options_come_before_environment_and_file(tmp_path: Path) -> None:
    write(tmp_path, PRINT_SETTINGS)
    write(tmp_path, 'policy = "priority"\nsplit = "on"\ntimeout_s = 9', "bytesched.toml")
    options = ["--policy", "fifo", "--partition-bytes=1KiB", "--credit-bytes", "1MB"]
    options += ["--timeline", "runs", "--set", "timeout_s=8", "--set", "timeout_s=7"]
    got = settings(
        run(
            [*OURS, *options, "script.py"],
            tmp_path,
            BYTESCHED_POLICY="priority",
            BYTESCHED_SPLIT="off",
        )
    )
    assert got["policy"] == ("fifo", "command line")
    assert got["partition_bytes"] == ("1024", "command line")
    assert got["credit_bytes"] == ("1000000", "command line")
    assert got["timeline"] == (str(tmp_path / "runs"), "command line")
    assert got["timeout_s"] == ("7.0", "command line")
    assert got["split"] == ("off", "environment BYTESCHED_SPLIT")
    assert got["compression"] == ("none", "default")


def test_options_reach_children(tmp_path: Path) -> None:
    write(tmp_path, PRINT_SETTINGS, "child.py")
    write(
        tmp_path, "import subprocess, sys; subprocess.run([sys.executable, 'child.py'], check=True)"
    )
    got = settings(run([*OURS, "--policy", "fifo", "script.py"], tmp_path))
    assert got["policy"] == ("fifo", "environment BYTESCHED_POLICY")


def test_off_turns_everything_off(tmp_path: Path) -> None:
    write(tmp_path, "import sys\nprint(len(sys.meta_path))\n" + PRINT_SETTINGS)
    first, _, rest = run([*OURS, "--off", "script.py"], tmp_path)[1].partition("\n")
    assert settings((0, rest, ""))["enabled"] == ("False", "command line")
    assert first == run(["script.py"], tmp_path)[1].partition("\n")[0]
    assert int(first) + 1 == int(run([*OURS, "script.py"], tmp_path)[1].partition("\n")[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition-bytes", "12x"], "partition_bytes = '12x' (command line): the unit"),
        (["--partition-bytes", "2MB", "--credit-bytes", "1MB"], "credit_bytes = 1000000 is below"),
        (["--policy", "fast"], "no policy 'fast'"),
        (["--set", "polcy=fifo"], "did you mean policy?"),
        (["--set", "tune=1", "--set", "tune_space=size=3"], "is gone: set partition_bytes or"),
        (["--set", "policy"], "--set FIELD=VALUE"),
        (["--timeout", "3"], "--timeout"),
        ([], "script.py"),
    ],
)
def test_nonsense_is_refused_before_the_script_starts(
    tmp_path: Path, options: list[str], said: str
) -> None:
    write(tmp_path, "print('started')")
    script = ["script.py"] if options else []
    code, out, err = run([*OURS, *options, *script], tmp_path)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("path", ["missing.py", "."])
def test_what_cannot_be_opened(tmp_path: Path, path: str) -> None:
    code, out, err = run([*OURS, path], tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("bytesched run: can't open")
    assert len(err.splitlines()) == 1


def test_wrong_file_is_refused_as_well(tmp_path: Path) -> None:
    write(tmp_path, "print('started')")
    write(tmp_path, "policy = 3", "bytesched.toml")
    assert run([*OURS, "script.py"], tmp_path)[:2] == (2, "")


def test_imports_nothing_for_a_script_that_does_not(tmp_path: Path) -> None:
    write(tmp_path, "import sys, json; print(*sorted({m.partition('.')[0] for m in sys.modules}))")
    plain, ours = (run([*how, "script.py"], tmp_path)[1].split() for how in ([], OURS))
    extra = set(ours) - set(plain) - sys.stdlib_module_names
    assert {name for name in extra if not name.startswith("_")} == {"bytesched"}
    assert not {"torch", "horovod", "multiprocessing"} & set(ours)


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("RANK", "WORLD_SIZE"),
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ],
)
def test_first_rank_says_when_there_was_nothing_to_schedule(
    tmp_path: Path, rank: str, size: str
) -> None:
    write(tmp_path, "print('trained')")
    local = rank.replace("RANK", "LOCAL_RANK").replace("PROCID", "LOCALID")
    first, second = (
        run([*OURS, "script.py"], tmp_path, **{rank: number, local: number, size: "2"})
        for number in ("0", "1")
    )
    alone = run([*OURS, "script.py"], tmp_path)
    assert [ended[0] for ended in (first, second, alone)] == [0, 0, 0]
    assert first[2].startswith("bytesched: nothing to schedule")
    assert second[2] == alone[2] == ""


@pytest.mark.parametrize(
    "end",
    [pytest.param("", marks=pytest.mark.nightly, id="by itself"), pytest.param("os._exit(0)")],
)
def test_the_last_line_names_a_model_that_was_left(tmp_path: Path, end: str) -> None:
    write(
        tmp_path,
        f"""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo", "file://{tmp_path}/store", rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        {end}
        """,
    )
    code, _, said = run([*OURS, "script.py"], tmp_path)
    assert code == 0
    assert said.splitlines()[-1] == (
        "bytesched: mode plain: DistributedDataParallel of Linear: there is one rank"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a re-raised error keeps its traceback")
def test_traceback_through_what_is_watched_has_no_frame_of_ours(tmp_path: Path) -> None:
    for package in ("horovod", "horovod/torch"):
        (tmp_path / package).mkdir()
        write(tmp_path, "", f"{package}/__init__.py")
    write(
        tmp_path, "def DistributedOptimizer(x):\n    return 1 / x\n", "horovod/torch/optimizer.py"
    )
    write(
        tmp_path,
        "from horovod.torch.optimizer import DistributedOptimizer\nDistributedOptimizer(0)\n",
    )
    code, _, err = both(["script.py"], tmp_path)
    assert code == 1
    assert "ZeroDivisionError" in err


def test_ranks_that_horovod_run_starts_are_watched(tmp_path: Path) -> None:
    """They unpickle the function, by value or by name, and never see the command line."""
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    write(tmp_path, "from horovod.runner import run\n", "horovod/__init__.py")
    write(
        tmp_path,
        """
        import pickle, subprocess, sys
        RANK = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))(2)"
        def run(func, num_proc):
            for _ in range(num_proc):
                subprocess.run([sys.executable, "-c", RANK, pickle.dumps(func).hex()], check=True)
        """,
        "horovod/runner.py",
    )
    write(tmp_path, "", "horovod/torch/__init__.py")
    write(tmp_path, "def DistributedOptimizer(x): ...\n", "horovod/torch/optimizer.py")
    write(
        tmp_path,
        """
        from horovod.torch.optimizer import DistributedOptimizer
        def work(number):
            print(number, hasattr(DistributedOptimizer, "__wrapped__"))
        """,
        "training.py",
    )
    write(tmp_path, "import horovod, training\nhorovod.run(training.work, num_proc=2)\n")
    assert run(["script.py"], tmp_path)[:2] == (0, "2 False\n" * 2)
    assert run([*OURS, "script.py"], tmp_path)[:2] == (0, "2 True\n" * 2)


@pytest.mark.parametrize("set_up", ["basicConfig", "handler"])
@pytest.mark.nightly
def test_lines_begin_with_the_name_where_the_script_sets_up_logging(
    tmp_path: Path, set_up: str
) -> None:
    made = {
        "basicConfig": "logging.basicConfig(level=logging.INFO, format='%(message)s')",
        "handler": "logging.root.addHandler(logging.StreamHandler()); logging.root.setLevel(20)",
    }
    write(
        tmp_path,
        f"""
        import logging, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        {made[set_up]}
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
        """,
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, _, said = run([*torchrun, *OURS, "script.py"], tmp_path)
    assert code == 0, said
    ours = [line for line in said.splitlines() if "mode cross" in line]
    assert all(line.startswith("bytesched: ") for line in ours)
    # At the start, and at the end.
    first, last = ours
    assert "1 chunk" in first
    assert "ms of communication per iteration" in last
