"""What is measured: the options of `bytesched bench`, which every rank gets as JSON."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from bytesched.bench.profile import Profile, load_profile, shipped_profiles
from bytesched.bench.systems import (
    EXCHANGE_SYSTEMS,
    HOROVOD_SYSTEMS,
    KVSTORE_SYSTEMS,
    SYSTEMS,
    System,
    check_systems,
    parse_systems,
)
from bytesched.environment import RankView
from bytesched.errors import ConfigError
from bytesched.parser import CommandParser, NumberT, within
from bytesched.values import nearest

MODELS: Final = ("gpt", "vgg", "resnet")
CONTROLLERS: Final = {"gloo": "Gloo", "mpi": "MPI"}
_RATE: Final = "1gbit"
_WORKERS: Final = 2
_EPILOG: Final = """\
Further systems: ddp-finalize (torch 2.15), zero1, horovod, bytesched-horovod; through
parameter servers over MPI: kv-plain, kv-p3, bytesched-kv.
A system may have options: ddp:bucket_mb=4, ddp:static_graph=1+bucket_view=1 (also of
ddp-finalize), ddp:timeline=FOLDER, bytesched:partition_bytes=512KiB+credit_bytes=1MiB,
horovod:fusion_mb=4+cycle_ms=1, kv-p3:slice=50000, kv-plain:transfer=one-sided; those of
bytesched-horovod and bytesched-kv are those of bytesched, and updates=1 of the latter.
--model also takes module:function of your own; the function returns a pair: the module, and a
function loss(module, seed) that runs forward on the batch of that seed and returns its loss.

  bytesched bench --lab 2 --rate 1gbit --emulate gpt
  bytesched bench --lab 2 --emulate gpt --controller mpi --systems horovod,bytesched-horovod
  bytesched bench --model vgg --batch 4,8,16,32 --record vgg.json --systems ddp --rounds 1
  bytesched bench --lab 2 --servers 1 --emulate vgg --systems kv-plain,kv-p3,bytesched-kv
  bytesched bench --lab 2 --rate 500mbit --emulate moe --comm-ratio 1
  bytesched bench --gpu-ranks 2 --batch 16 --clip 1
  bytesched bench --compare gpt.json --json now.json
  torchrun --nproc-per-node 1 --nnodes 2 ... -m bytesched bench --model gpt --json gpt.json
"""
_REPLACED: Final = {
    "--optimizer": "all systems train with AdamW",
    "--png": "bytesched report RESULT.json -o OUT.png draws it",
    "--share": "what it measured is in the notes on jobs that take turns",
}


def batches(text: str) -> list[int]:
    """Batch sizes, by their size."""
    try:
        return sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, as 8 or 4,8,16") from None


def _option(default: Any, sign: str, meaning: str, /, **how: Any) -> Any:
    """A field that is an option; its metadata is what argparse is told.

    With another default of that where the field has one of its own.
    """
    shown = " (%(default)s)" if default not in (None, "") and "default" not in how else ""
    return field(default=default, metadata={"metavar": sign, "help": meaning + shown, **how})


def _number(default: Any, least: NumberT, most: NumberT, sign: str, meaning: str) -> Any:
    return _option(default, sign, meaning, type=within(least, most))


_MOST: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Specification:
    """The options of the command as they are given, and what is made of some of them."""

    systems: tuple[System, ...] = _option(
        (),
        "LIST",
        f"what to measure ({','.join(SYSTEMS)}; of a profile with layers of experts "
        f"{','.join(EXCHANGE_SYSTEMS)})",
        default="",
    )
    #: the name of the profile, where one is emulated
    model: str = _option(
        "", "NAME", f"{', '.join(MODELS)} or module:function (default {MODELS[0]})"
    )
    emulate: str = _option(
        "", "PROFILE", f"emulate the compute of {', '.join(shipped_profiles())} or FILE.json"
    )
    rate: str = _option("", "RATE", f"link of each emulated host (default {_RATE})")
    lab: int | None = _number(None, 2, 64, "N", "start ranks on N hosts emulated on this machine")
    ranks_per_host: int = _number(1, 1, 64, "N", "ranks on each emulated host")
    workers: int | None = _number(
        None, 2, 64, "N", f"start N ranks here, over loopback (default {_WORKERS})"
    )
    iterations: int = _number(20, 1, _MOST, "N", "timed iterations per round")
    rounds: int = _number(3, 1, _MOST, "N", "rounds, in each of which every system has a turn")
    warmup: int = _number(5, 2, _MOST, "N", "untimed iterations per round")
    sweep_iterations: int = _number(8, 1, _MOST, "N", "timed iterations per swept setting")
    #: None: there is no store
    servers: int | None = _number(None, 0, 32, "N", "ranks that serve; 0: all do (default 1)")
    clip: float = _number(0.0, 0.0, 1e6, "NORM", "clip by the norm of all gradients; 0: do not")
    compute_scale: float = _number(1.0, 1e-3, 1e6, "X", "emulate a device X x slower")
    comm_ratio: float | None = _number(None, 1e-3, 1e6, "X", "emulate communication of X x compute")
    threads: int = _number(1, 0, _MOST, "N", "threads of torch per rank; 0: as torch chooses")
    timeout_s: float = _number(300.0, 1e-3, 1e6, "S", "longest time of one collective")
    #: of each rank; 0: the model's own
    batch: int = _option(
        0,
        "N",
        "batch size of each rank, of real models; several of them for --record, of which systems "
        "get the largest",
        type=batches,
        default=[0],
    )
    controller: str = _option(
        "gloo", "", "controller of Horovod (default gloo)", choices=CONTROLLERS, default=None
    )
    json: str = _option("", "FILE", "write every figure")
    record: str = _option("", "FILE", "write the model's compute profile, at every --batch")
    compare: tuple[str, ...] = _option(
        (),
        "FILE",
        "OLD.json: measure the same again, and fail on a regression; OLD.json NEW.json: compare "
        "two results",
        nargs="+",
        default=(),
    )
    gpu_ranks: int | None = _number(
        *(None, 2, 16, "N"),
        "measure N ranks over NCCL on one device, under MPS if that is installed: DDP with "
        "several bucket sizes, FSDP2 and bytesched, and T* beside them; --model gpt, conv or small",
    )
    device: str = _option(
        "",
        "",
        "of --gpu-ranks (default cuda); cpu tries the same with tiny models over Gloo",
        choices=("cuda", "cpu"),
    )
    trace: bool = field(
        default=False,
        metadata={
            "action": "store_true",
            "help": "print an iteration of bytesched with --gpu-ranks",
        },
    )
    #: what is emulated, if anything is
    profile: Profile | None = None
    #: batch sizes whose compute profiles are recorded
    recorded: tuple[int, ...] = ()
    #: of ranks that share a GPU: of the environment of each, and how they share it
    variables: dict[str, str] = field(default_factory=dict)
    sharing: str = ""

    @property
    def hosts(self) -> int:
        """Emulated hosts, or processes here."""
        return self.lab or self.workers or _WORKERS

    @property
    def link_rate(self) -> str | None:
        """Of each emulated host, if there are any."""
        return (self.rate or _RATE) if self.lab else None

    def is_any_of(self, kinds: tuple[str, ...]) -> bool:
        """Whether one of these systems is measured."""
        return any(system.kind in kinds for system in self.systems)


def bench_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = CommandParser(
        prog="bytesched bench",
        description="Measure data-parallel systems in turn on the same work.\n"
        "Says first how long that will take. When it is stopped (ctrl-C, SIGTERM) it prints the\n"
        "table of what was measured until then.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        replaced=_REPLACED,
    )
    for each in fields(Specification):
        if how := {
            name: value for name, value in each.metadata.items() if value or name == "default"
        }:
            flag = f"--{each.name.replace('_', '-')}"
            parser.add_argument(flag, **{"default": each.default, **how})
    return parser


def as_given(options: argparse.Namespace, **others: Any) -> Specification:
    """The options of the command, and these in place of what was given."""
    own = {
        "batch": options.batch[-1],
        "compare": tuple(options.compare),
        "controller": options.controller or "gloo",
    }
    return Specification(**{**vars(options), **own, **others})


def specification(options: argparse.Namespace, view: RankView) -> Specification:
    """What the options ask for. Raises `ConfigError` for what cannot be run."""
    _check_launch(options, view)
    check_outputs(options)
    profile = load_profile(options.emulate) if options.emulate else None
    model = profile.name if profile else options.model or MODELS[0]
    if not (profile or ":" in model or model in MODELS):
        raise ConfigError(f"--model {model!r}{nearest(model, MODELS)}")
    if not profile and (options.comm_ratio or options.compute_scale != 1.0):
        raise ConfigError(
            "--comm-ratio and --compute-scale change emulated compute and need --emulate; "
            "for a real model change --batch"
        )
    several = len(options.batch) > 1
    if options.batch[0] < several:
        raise ConfigError(f"--batch {options.batch[0]}: at least {several:d}")
    if several and not (model in MODELS and not profile and options.record):
        raise ConfigError(
            f"--batch with several sizes is for --record of {', '.join(MODELS)}: systems are "
            "measured with one"
        )
    has_experts = profile is not None and profile.exchanged_bytes > 0
    usual = EXCHANGE_SYSTEMS if has_experts else SYSTEMS
    systems = parse_systems(options.systems or ",".join(usual))
    check_systems(
        systems,
        launcher=view.launcher,
        has_experts=has_experts,
        controller=options.controller,
        servers=options.servers,
    )
    if has_experts:
        refuse(options, "a profile with layers of experts", "clip", "record")
    servers = None
    if systems[0].kind in KVSTORE_SYSTEMS:
        refuse(options, ", ".join(KVSTORE_SYSTEMS), "clip")
        servers = 1 if options.servers is None else options.servers
    spec = as_given(
        options,
        systems=systems,
        model=model,
        profile=profile,
        servers=servers,
        recorded=tuple(options.batch) if options.record else (),
    )
    if spec.ranks_per_host > 1 and spec.is_any_of(HOROVOD_SYSTEMS + KVSTORE_SYSTEMS):
        raise ConfigError("--ranks-per-host is for systems over torch.distributed")
    return spec


def refuse(options: object, what: str, *names: str) -> None:
    """Raises `ConfigError` if one of these options is given, which are not for ``what``."""
    for name in names:
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} is not for {what}")


def check_outputs(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for what could not be measured, drawn or written."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench needs torch: pip install 'bytesched[torch]'")
    for name in ("json", "record"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")


def _check_launch(options: argparse.Namespace, view: RankView) -> None:
    for one, other in (("model", "emulate"), ("lab", "workers"), ("comm_ratio", "compute_scale")):
        if getattr(options, one) and getattr(options, other) not in (None, "", 1.0):
            flags = f"--{one} and --{other}".replace("_", "-")
            raise ConfigError(f"{flags} exclude each other")
    if view.launcher != "none":
        if options.lab or options.workers:
            raise ConfigError(f"--lab and --workers start ranks, and {view.launcher} has done so")
        if view.world_size < 2:
            raise ConfigError(f"{view.launcher} started one rank, which has nothing to send")
    if options.rate and not options.lab:
        raise ConfigError("--rate shapes the links of emulated hosts and needs --lab N")
    if options.ranks_per_host > 1 and not options.lab:
        raise ConfigError("--ranks-per-host is for emulated hosts and needs --lab N")
