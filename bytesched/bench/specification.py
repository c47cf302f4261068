"""What is measured: the options of `bytesched bench`, which every rank gets as JSON."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, field, fields
from typing import Any, Final

from bytesched.bench.profile import Profile, load_profile, shipped_profiles
from bytesched.bench.systems import (
    EXCHANGE_SYSTEMS,
    GPU_KINDS,
    GPU_SYSTEMS,
    HOROVOD_SYSTEMS,
    KINDS,
    KVSTORE_SYSTEMS,
    SYSTEMS,
    System,
    check_systems,
    parse_systems,
)
from bytesched.environment import RankView
from bytesched.errors import ConfigError
from bytesched.parser import CommandParser, NumberT, within, writable_file
from bytesched.values import nearest

MODELS: Final = ("gpt", "vgg", "resnet")
GPU_MODELS: Final = ("gpt", "conv", "small")
CONTROLLERS: Final = {"gloo": "Gloo", "mpi": "MPI"}
_RATE: Final = "1gbit"
#: ranks that are started here
_RANKS: Final = 2
_EPILOG: Final = """\
Further systems: ddp-finalize (torch 2.15), zero1, horovod, bytesched-horovod; through
parameter servers over MPI: kv-plain, kv-p3, bytesched-kv; with layers of experts (--emulate moe):
ddp, ddp-own-group, bytesched-no-lane, bytesched, bytesched-pieces, idle.
A system may have options: ddp:bucket_mb=4, ddp:static_graph=1+bucket_view=1 (also of
ddp-finalize), ddp:timeline=FOLDER, bytesched:partition_bytes=512KiB+credit_bytes=1MiB,
horovod:fusion_mb=4+cycle_ms=1, kv-p3:slice=50000, kv-plain:transfer=one-sided; those of
bytesched-horovod and bytesched-kv are those of bytesched, and updates=1 of the latter.
--model also takes module:function of your own; the function returns a pair: the module, and a
function loss(module, seed) that runs forward on the batch of that seed and returns its loss.
--gpu-ranks measures models gpt, conv and small, under MPS if that is installed: DDP with several
bucket sizes, FSDP2 and bytesched; --device cpu tries the same with tiny models over Gloo.
--compare OLD.json measures the same again, and fails on a regression.

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
    "--compute-scale": "--comm-ratio X paces emulated compute",
    "--optimizer": "all systems train with AdamW",
    "--png": "bytesched report RESULT.json -o OUT.png draws it",
    "--share": "what it measured is in the notes on jobs that take turns",
    "--threads": "OMP_NUM_THREADS says how many each rank has, else it has one",
    "--timeout-s": "a collective, or the block of a system, has 300 s: take fewer --iterations",
    "--workers": "torchrun --standalone --nproc-per-node N -m bytesched bench starts N ranks here; "
    "systems over MPI have two, or --lab N",
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
    return field(default=default, metadata={"metavar": sign, "help": meaning, **how})


def _number(default: Any, least: NumberT, most: NumberT, sign: str, meaning: str) -> Any:
    shown = "" if default is None else " (%(default)s)"
    return _option(default, sign, meaning + shown, type=within(least, most))


_MOST: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Specification:
    """The options of the command as they are given, and what is made of some of them."""

    systems: tuple[System, ...] = _option(
        (), "LIST", f"measure these ({','.join(SYSTEMS)})", default=""
    )
    #: the name of the profile, where one is emulated
    model: str = _option("", "NAME", f"{', '.join(MODELS)} or module:function ({MODELS[0]})")
    emulate: str = _option("", "PROFILE", f"emulate {', '.join(shipped_profiles())} or FILE.json")
    rate: str = _option("", "RATE", f"link of each emulated host ({_RATE})")
    lab: int | None = _number(None, 2, 64, "N", f"emulate N hosts; else {_RANKS} ranks, loopback")
    ranks_per_host: int = _number(1, 1, 64, "N", "ranks on each emulated host")
    iterations: int = _number(20, 1, _MOST, "N", "timed iterations per round")
    rounds: int = _number(3, 1, _MOST, "N", "rounds, in each of which every system has a turn")
    warmup: int = _number(5, 2, _MOST, "N", "untimed iterations per round")
    sweep_iterations: int = _number(8, 1, _MOST, "N", "timed iterations per swept setting")
    #: None: there is no store
    servers: int | None = _number(None, 0, 32, "N", "ranks that serve; 0: all do (default 1)")
    clip: float = _number(0.0, 0.0, 1e6, "NORM", "clip by the norm of all gradients; 0: do not")
    comm_ratio: float | None = _number(None, 1e-3, 1e6, "X", "emulate communication of X x compute")
    #: of each rank; 0: the model's own
    batch: int = _option(0, "N", "of each rank; --record takes several", type=batches, default=[0])
    controller: str = _option("gloo", "", "of Horovod (gloo)", choices=CONTROLLERS, default=None)
    json: str | None = _option(None, "FILE", "write every figure", type=writable_file)
    record: str | None = _option(None, "FILE", "write the model's profile", type=writable_file)
    compare: tuple[str, ...] = _option((), "FILE", "old (and new) --json", nargs="+", default=())
    gpu_ranks: int | None = _number(None, 2, 16, "N", "NCCL ranks that share one device")
    device: str = _option("", "", "of --gpu-ranks (cuda)", choices=("cuda", "cpu"))
    trace: bool = _option(False, "", "with --gpu-ranks, print an iteration", action="store_true")
    #: what is emulated, if anything is
    profile: Profile | None = None
    #: batch sizes whose compute profiles are recorded
    recorded: tuple[int, ...] = ()
    #: longest time of one collective, and of a block in processes of its own
    timeout_s: float = 300.0

    @property
    def hosts(self) -> int:
        """Emulated hosts, or processes here."""
        return self.lab or self.gpu_ranks or _RANKS

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
        replaced=_REPLACED,
    )
    for each in fields(Specification):
        if how := {
            name: value for name, value in each.metadata.items() if value or name == "default"
        }:
            flag = f"--{each.name.replace('_', '-')}"
            parser.add_argument(flag, **{"default": each.default, **how})
    return parser


#: options that are nothing without another one
_NEEDED: Final = {
    "rate": "lab",
    "ranks_per_host": "lab",
    "comm_ratio": "emulate",
    "device": "gpu_ranks",
    "trace": "gpu_ranks",
}


def specification(options: argparse.Namespace, view: RankView) -> Specification:
    """What the options ask for. Raises `ConfigError` for what cannot be run."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench needs torch: pip install 'bytesched[torch]'")
    on_gpu = options.gpu_ranks is not None
    if view.launcher != "none":
        if options.lab or on_gpu:
            raise ConfigError(
                f"--lab and --gpu-ranks start ranks, and {view.launcher} has done so: leave the "
                "launcher out"
            )
        if view.world_size < 2:
            raise ConfigError(f"{view.launcher} started one rank, which has nothing to send")
    if options.model and options.emulate:
        raise ConfigError("--model and --emulate exclude each other")
    for name, other in _NEEDED.items():
        if getattr(options, name) != getattr(Specification, name) and not getattr(options, other):
            raise ConfigError(f"{_flag(name)} needs {_flag(other)}")
    if on_gpu:
        others = ("lab", "emulate", "servers", "controller", "record")
        _refuse(options, "--gpu-ranks", *others)
    profile = load_profile(options.emulate) if options.emulate else None
    models = GPU_MODELS if on_gpu else MODELS
    model = profile.name if profile else options.model or models[0]
    if not (profile or model in models or (":" in model and not on_gpu)):
        raise ConfigError(f"--model {model!r}{nearest(model, models)}")
    several = len(options.batch) > 1
    if options.batch[0] < several:
        raise ConfigError(f"--batch {options.batch[0]}: at least {several:d}")
    if several and not (model in MODELS and not profile and options.record):
        raise ConfigError(
            f"--batch with several sizes is for --record of {', '.join(MODELS)}: systems are "
            "measured with one"
        )
    has_experts = profile is not None and profile.exchanged_bytes > 0
    usual = GPU_SYSTEMS if on_gpu else EXCHANGE_SYSTEMS if has_experts else SYSTEMS
    text = options.systems or ",".join(usual)
    systems = parse_systems(text, GPU_KINDS if on_gpu else KINDS)
    check_systems(
        systems,
        launcher=view.launcher,
        has_experts=has_experts,
        controller=options.controller,
        servers=options.servers,
    )
    if has_experts:
        _refuse(options, "a profile with layers of experts", "clip", "record")
    has_store = systems[0].kind in KVSTORE_SYSTEMS
    if has_store:
        _refuse(options, ", ".join(KVSTORE_SYSTEMS), "clip")
    made = {
        "batch": options.batch[-1],
        "compare": tuple(options.compare),
        "controller": options.controller or "gloo",
        "device": options.device or ("cuda" if on_gpu else ""),
        "model": model,
        "profile": profile,
        "recorded": tuple(options.batch) if options.record else (),
        "servers": 1 if has_store and options.servers is None else options.servers,
        "systems": systems,
    }
    spec = Specification(**{**vars(options), **made})
    if spec.ranks_per_host > 1 and spec.is_any_of(HOROVOD_SYSTEMS + KVSTORE_SYSTEMS):
        raise ConfigError("--ranks-per-host is for systems over torch.distributed")
    return spec


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(options: argparse.Namespace, what: str, *names: str) -> None:
    """Raises `ConfigError` if one of these options is given, which are not for ``what``."""
    for name in names:
        if getattr(options, name):
            raise ConfigError(f"{_flag(name)} is not for {what}")
