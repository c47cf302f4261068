"""The questions that docs/results.md answers: what is measured, and what its tables show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bytesched.bench.systems import EXCHANGE_SYSTEMS

__all__ = ["QUESTIONS", "Case", "Column", "Question", "Series"]

BENCH = "bytesched bench --lab {hosts} --rate 1gbit --emulate {model} --comm-ratio 1"
VIEWS = "+bucket_view=1"
MODELS = ("gpt", "vgg", "resnet")


@dataclass(frozen=True)
class Case:
    """A row: a file in docs/results, without its suffix, and the command that writes it."""

    file: str
    label: str
    command: str


@dataclass(frozen=True)
class Series:
    """Cases with one command, in which {names} stand for what differs between them."""

    command: str
    #: of each case, by name
    values: tuple[dict[str, str], ...]

    def cases(self, question: str) -> Iterator[Case]:
        """One for each of the values."""
        for values in self.values:
            file = "-".join([question, *values.values()]).replace(" ", "-")
            clip = "--clip 1" if values.get("clipping") == "clipped" else ""
            command = self.command.format(clip=clip, **values)
            yield Case(file, ", ".join(values.values()), " ".join(command.split()))


@dataclass(frozen=True)
class Column:
    """A system of a table: its title, and its names in the files, of which a file has one."""

    title: str
    systems: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A section of the page."""

    name: str
    title: str
    #: what is asked and what stands beside; {0}, {1}, ...: how many times as long each peer takes
    sentence: str
    series: tuple[Series, ...]
    #: peers, and last what is compared with them; empty: predictions
    columns: tuple[Column, ...] = ()
    #: on two quiet cores
    minutes: float = 0.0
    #: further columns of "gain", "cpu", "memory", "exchanges"
    more: tuple[str, ...] = ()
    has_picture: bool = False

    def cases(self) -> list[Case]:
        """Those of all series."""
        return [case for series in self.series for case in series.cases(self.name)]


def _each(**fixed: str) -> tuple[dict[str, str], ...]:
    return tuple({**fixed, "model": model} for model in MODELS)


def _of_buckets(title: str, kind: str, more: str = "") -> Column:
    return Column(title, tuple(f"{kind}:bucket_mb={mb}{VIEWS}{more}" for mb in (1, 4)))


QUESTIONS = (
    Question(
        "ddp",
        "DDP on a slow link",
        "How much faster does a DDP script become where communication takes as long as compute? "
        "With DDP as it comes an iteration takes {0} times as long as with bytesched, "
        "with its best bucket and bucket views {1} times as long; compute is emulated.",
        (
            Series(
                f"chrt -r 5 {BENCH} --systems ddp,ddp-best,bytesched --iterations 8 --rounds 2 "
                "--sweep-iterations 1",
                _each(hosts="2") + _each(hosts="4"),
            ),
        ),
        (
            Column("ddp", ("ddp",)),
            Column("ddp-best", ("ddp-best",)),
            Column("bytesched", ("bytesched",)),
        ),
        minutes=11,
        more=("gain", "cpu"),
        has_picture=True,
    ),
    Question(
        "forms",
        "Other forms of DDP",
        "How much of that does DDP bring by itself in torch 2.15? With buckets of 1 or 4 MB, "
        "and views, it takes {0} times as long, with `static_graph` as well {1} times, "
        "and where it finalizes late, so that backward returns while all-reduces run, {2} times. "
        "What Accelerate makes of a model is `ddp` in the table above.",
        (
            Series(
                "chrt -r 5 $(scripts/test-torch newest --python) -m "
                + BENCH
                + f" --systems ddp:bucket_mb={{MB}}{VIEWS},"
                f"ddp:bucket_mb={{MB}}{VIEWS}+static_graph=1,"
                f"ddp-finalize:bucket_mb={{MB}}{VIEWS},bytesched --iterations 8 --rounds 2",
                (
                    {"hosts": "2", "model": "gpt", "MB": "1"},
                    {"hosts": "2", "model": "resnet", "MB": "4"},
                ),
            ),
        ),
        (
            _of_buckets("ddp", "ddp"),
            _of_buckets("static", "ddp", "+static_graph=1"),
            _of_buckets("late", "ddp-finalize"),
            Column("bytesched", ("bytesched",)),
        ),
        minutes=2.5,
        more=("cpu",),
    ),
    Question(
        "clipped",
        "Scripts that clip",
        "And where the script clips by the norm of all gradients, which waits for all of them? "
        "DDP with its best bucket takes {0} times as long.",
        (
            Series(
                f"chrt -r 5 {BENCH} --clip 1 --systems ddp-best,bytesched --iterations 8 --rounds "
                f"2 --warmup 8 --sweep-iterations 1",
                (*_each(hosts="2"), {"hosts": "4", "model": "gpt"}),
            ),
        ),
        (Column("ddp-best", ("ddp-best",)), Column("bytesched", ("bytesched",))),
        minutes=5.5,
        more=("gain", "cpu"),
    ),
    Question(
        "moe",
        "Experts: all-to-alls beside gradients",
        "A GPT with layers of experts (`--emulate moe`), whose all-to-alls share the link with "
        "gradients. DDP with `all_to_all_single` takes {0} times as long as bytesched with the "
        "exchange of `bytesched.plugins.moe` in pieces (*module*), with a group of its own for "
        "all-to-alls {1} times. With `all_to_all_single` beside `wrap` it takes {2} times as "
        "long, and {3} times inside an urgent section (*lane*). *idle* sends no gradients. "
        "*p50, p95* are those of all-to-alls on all ranks, from call to end (*module*: how long "
        "each piece was waited for), *to idle* the p95 of the lane over that of idle. T\\* is "
        "the bound for whole all-to-alls and for pieces, *x T\\** of the latter. Links have half "
        "the rate of those in the other tables, and compute is as much slower, so that two cores "
        "suffice.",
        (
            Series(
                "chrt -r 5 bytesched bench --lab {hosts} --rate {rate} --emulate moe --comm-ratio "
                f"1 --systems {','.join(EXCHANGE_SYSTEMS)} --iterations 6 --rounds {{rounds}} "
                "--warmup 4",
                (
                    {"hosts": "2", "rate": "500mbit", "rounds": "2"},
                    {"hosts": "4", "rate": "500mbit", "rounds": "1"},
                ),
            ),
        ),
        (
            Column("ddp", ("ddp",)),
            Column("own group", ("ddp-own-group",)),
            Column("no lane", ("bytesched-no-lane",)),
            Column("lane", ("bytesched",)),
            Column("module", ("bytesched-pieces",)),
        ),
        minutes=9.5,
        more=("exchanges",),
    ),
    Question(
        "real",
        "Real models on the CPU",
        "And where the model computes on the CPU, so that communication and bytesched take cores "
        "from it? DDP takes {0} times as long, with its best bucket {1} times as long.",
        (
            Series(
                "bytesched bench --lab 2 --rate 1gbit --model {model} --systems "
                "ddp,ddp-best,bytesched --iterations 8 --rounds 2 --sweep-iterations 1",
                _each(),
            ),
        ),
        (
            Column("ddp", ("ddp",)),
            Column("ddp-best", ("ddp-best",)),
            Column("bytesched", ("bytesched",)),
        ),
        minutes=4.5,
        more=("gain", "cpu"),
    ),
    Question(
        "stores",
        "Parameter servers",
        "Two workers and one server or two, through the store over MPI and through MXNet's: the "
        "store as it comes takes {0} times as long, with P3 {1} times as long.",
        (
            Series(
                "bytesched bench --lab 2 --servers {servers} --rate 1gbit --emulate {model} "
                "--comm-ratio 1 --systems kv-plain,kv-p3,bytesched-kv --iterations 5 --rounds 2 "
                "--warmup 3",
                (
                    {"store": "mpi", "servers": "1", "model": "gpt"},
                    {"store": "mpi", "servers": "1", "model": "vgg"},
                    {"store": "mpi", "servers": "2", "model": "gpt"},
                ),
            ),
            Series(
                "$(scripts/mxnet-venv) scripts/measure-mxnet --servers {servers} --emulate {model} "
                "--systems plain,p3,bytesched --iterations 3 --rounds 2 --warmup 3",
                ({"store": "mxnet", "servers": "1", "model": "gpt"},),
            ),
        ),
        (
            Column("plain", ("kv-plain", "plain")),
            Column("P3", ("kv-p3", "p3")),
            Column("bytesched", ("bytesched-kv", "bytesched")),
        ),
        minutes=5.5,
    ),
    Question(
        "horovod",
        "Horovod",
        "Two hosts, on Gloo and on MPI: Horovod as it comes takes {0} times as long, with the "
        "fusion buffer and cycle time that were best in [an earlier "
        "sweep](notes/2026-11-22-horovod-and-stores.md) {1} times as long.",
        (
            Series(
                "bytesched bench --lab 2 --rate 1gbit --emulate {model} --comm-ratio 1 "
                "--controller {controller} "
                "--systems horovod,horovod:fusion_mb=4+cycle_ms=1,bytesched-horovod "
                "--iterations 6 --rounds 2",
                (
                    {"controller": "gloo", "model": "gpt"},
                    {"controller": "gloo", "model": "vgg"},
                    {"controller": "mpi", "model": "gpt"},
                ),
            ),
        ),
        (
            Column("horovod", ("horovod",)),
            Column("horovod, 4 MB", ("horovod:fusion_mb=4+cycle_ms=1",)),
            Column("bytesched", ("bytesched-horovod",)),
        ),
        minutes=4,
        more=("gain", "cpu"),
    ),
    Question(
        "sharded",
        "A sharded update",
        "What does `shard=True` cost in time, and save in memory? DDP with buckets of 1 MB takes "
        "{0} times as long, torch's ZeRO {1} times, bytesched without it {2} times. *State* is "
        "the optimizer's of a rank, *peak* the most memory that training took on one.",
        (
            Series(
                f"chrt -r 5 {BENCH} " + "{clip} "
                f"--systems ddp:bucket_mb=1{VIEWS},zero1,bytesched,bytesched:shard=true "
                "--iterations 6 --rounds 2",
                (
                    {"hosts": "2", "model": "vgg", "clipping": "not clipped"},
                    {"hosts": "2", "model": "vgg", "clipping": "clipped"},
                    {"hosts": "4", "model": "gpt", "clipping": "not clipped"},
                ),
            ),
        ),
        (
            Column("ddp, 1 MB", (f"ddp:bucket_mb=1{VIEWS}",)),
            Column("zero1", ("zero1",)),
            Column("unsharded", ("bytesched",)),
            Column("sharded", ("bytesched:shard=true",)),
        ),
        minutes=4.5,
        more=("memory",),
    ),
    Question(
        "ranks",
        "Several ranks on each host",
        "Two hosts with two ranks each, where bytesched sums on a host before it sums between "
        "hosts: DDP with its best bucket (at 250 Mbit/s 1 MB) takes {0} times as long, bytesched "
        "without these two levels {1} times as long. All ranks share two cores, which matters "
        "less on the slower link.",
        (
            Series(
                "chrt -r 5 bytesched bench --lab 2 --ranks-per-host 2 --rate {rate} --emulate "
                "{model} --comm-ratio 1 --systems ddp-best,bytesched:hierarchy=off,bytesched "
                "--iterations 6 --rounds 2 --warmup 4 --sweep-iterations 1",
                ({"rate": "1gbit", "model": "gpt"},),
            ),
            Series(
                f"chrt -r 5 bytesched bench --lab 2 --ranks-per-host 2 --rate {{rate}} --emulate "
                f"{{model}} --comm-ratio 1 --systems "
                f"ddp:bucket_mb=1{VIEWS},bytesched:hierarchy=off,bytesched --iterations 4 "
                f"--rounds 1 --warmup 4",
                ({"rate": "250mbit", "model": "gpt"},),
            ),
        ),
        (
            Column("ddp-best", ("ddp-best", f"ddp:bucket_mb=1{VIEWS}")),
            Column("one level", ("bytesched:hierarchy=off",)),
            Column("bytesched", ("bytesched",)),
        ),
        minutes=3.5,
        more=("cpu",),
    ),
    Question(
        "predictions",
        "Predictions",
        "How near does `bytesched sim` come to the first table? Of a row, only T\\* goes in ([how]"
        "(how-to/will-it-pay.md)). Predicted / measured ms:",
        (Series("scripts/calibrate-sim ddp-*.json", ({},)),),
    ),
    Question(
        "nothing",
        "Where nothing can be gained",
        "What does bytesched cost on links that take no time (100 Gbit/s), where backward hides "
        "all communication? DDP takes {0} times as long, with buckets of 4 MB {1} times, and with "
        "bucket views besides {2} times as long: below 1, bytesched is slower.",
        (
            Series(
                f"chrt -r 5 bytesched bench --lab 2 --rate 100gbit --emulate {{model}} "
                f"{{clip}} --systems ddp,ddp:bucket_mb=4,ddp:bucket_mb=4{VIEWS},bytesched "
                "--iterations 8 --rounds 2 --warmup 22",
                (
                    {"model": "gpt", "clipping": "not clipped"},
                    {"model": "resnet", "clipping": "not clipped"},
                    {"model": "resnet", "clipping": "clipped"},
                ),
            ),
        ),
        (
            Column("ddp", ("ddp",)),
            Column("4 MB", ("ddp:bucket_mb=4",)),
            Column("4 MB, views", (f"ddp:bucket_mb=4{VIEWS}",)),
            Column("bytesched", ("bytesched",)),
        ),
        minutes=5.5,
        more=("cpu",),
    ),
)
