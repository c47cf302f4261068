"""What was predicted: rows of a table, and one sentence: does it pay here, by how much, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bytesched.bench.systems import System
from bytesched.link.fabric import Fabric
from bytesched.link.host import no_gain
from bytesched.sim.predict import Prediction, predict
from bytesched.sim.systems import Model


@dataclass(frozen=True)
class Case:
    """Systems that train one model on one fabric."""

    model: Model
    fabric: Fabric
    systems: tuple[System, ...]

    @property
    def ratio(self) -> float:
        """Communication over compute."""
        profile = self.model.profile
        return profile.nbytes / self.fabric.gradient_bytes_per_s / profile.compute_s

    def predictions(self) -> list[Prediction]:
        """One for each system."""
        return [predict(system, self.model, self.fabric) for system in self.systems]


_TITLES = ("ranks", "system", "size", "iteration ms", "x T*", "vs best", "collectives")

#: what the columns are, for beneath them
LEGEND = """
size: of DDP's buckets, or of chunks. x T*: over what no schedule can beat.
vs best: how many times as fast as the fastest other system. collectives: all-reduces of an
iteration."""


def rows(found: Sequence[Sequence[Prediction]]) -> list[tuple[str, ...]]:
    """A row for each system and number of ranks, below the titles."""
    lines: list[tuple[str, ...]] = [_TITLES]
    for of_ranks in found:
        _, peer = rivals(of_ranks)
        for one in of_ranks:
            lines.append(
                (
                    str(one.ranks),
                    one.system,
                    one.chosen,
                    f"{1e3 * one.iteration_s:.1f}",
                    f"{one.to_optimum:.3f}",
                    f"{peer.iteration_s / one.iteration_s:.2f}x" if peer else "",
                    str(one.collectives),
                )
            )
    return lines


#: how many times as fast as the best peer is a yes, and from where on it is hardly worth it
_YES: Final = 1.03
_HARDLY: Final = 1.005
#: from this multiple of T* on, what is lost is named
_NEAR = 1.03
#: where communication takes so many times as long as compute, or such a part of it
_MUCH, _LITTLE = 2.5, 0.5


def rivals(found: Sequence[Prediction]) -> tuple[Prediction | None, Prediction | None]:
    """The fastest of ours, and the fastest peer; None where there is none."""
    ours = [one for one in found if one.system.startswith("bytesched")]
    peers = [one for one in found if one not in ours]
    return _fastest(ours), _fastest(peers)


def _fastest(found: Iterable[Prediction]) -> Prediction | None:
    return min(found, key=lambda one: one.iteration_s, default=None)


def gain(found: Sequence[Prediction]) -> float:
    """How many times as fast as the best peer ours is; 1 if one is missing."""
    ours, peer = rivals(found)
    return peer.iteration_s / ours.iteration_s if ours and peer else 1.0


def verdict(case: Case, found: Sequence[Prediction]) -> str:
    """The sentence about one number of ranks; empty if bytesched was not predicted."""
    ours, peer = rivals(found)
    if ours is None:
        return ""
    head = f"{case.fabric.ranks} ranks: "
    if peer is None:
        return head + "no verdict, as no system to compare with was predicted (ddp-best)."
    possible = peer.iteration_s / ours.optimum_s
    times = gain(found)
    if possible < _HARDLY:
        return head + (
            f"no gain here, {peer.system} takes {_ms(peer)}, within {100 * (possible - 1):.1f} % "
            f"of what any schedule can reach ({_why(case.ratio)})."
        )
    if times < _HARDLY:
        compared = "as long as" if times > 1 / _HARDLY else f"{1 / times:.2f} times as long as"
        return head + (
            f"no gain here, {ours.system} takes {_ms(ours)}, {compared} {peer.system} ({_ms(peer)})"
            f"{_lost(case, ours)}."
        )
    if case.fabric.algorithm == "nccl" and (
        why := no_gain(
            len(case.model.tensors()), ours.collectives, peer.iteration_s - ours.optimum_s
        )
    ):
        return f"{head}{why}."
    answer = "yes" if times >= _YES else "hardly"
    return head + (
        f"{answer}, {ours.system} takes {_ms(ours)} and is {times:.2f} times as fast as "
        f"{peer.system} ({_ms(peer)}), of {possible:.2f} that are possible: {_why(case.ratio)}"
        f"{_lost(case, ours)}{_CLOSE if answer == 'hardly' else ''}."
    )


_CLOSE: Final = "; predictions miss by as much"


def _ms(one: Prediction) -> str:
    return f"{1e3 * one.iteration_s:.1f} ms"


def _why(ratio: float) -> str:
    text = f"communication takes {ratio:.2g} times as long as compute"
    if ratio < _LITTLE:
        return f"{text} and hides behind backward"
    if ratio > _MUCH:
        return f"{text}, of which no order can hide much"
    return text


def _lost(case: Case, ours: Prediction) -> str:
    if ours.to_optimum < _NEAR:
        return ""
    fabric, costs = case.fabric, case.model.costs
    above = f"; it stays {100 * (ours.to_optimum - 1):.0f} % above T*, as "
    if costs.cores.left(costs.cpu_load) < 1:
        return above + (
            f"each of its {ours.collectives} collectives waits for cores, of which a rank has "
            f"{costs.cores.per_rank:.3g}"
        )
    nbytes = case.model.profile.nbytes / ours.collectives
    start_up_ms = 1e3 * (fabric.start_up_s(nbytes) or fabric.occupied_s(0))
    return above + (
        f"each of its {ours.collectives} collectives among {fabric.ranks} ranks takes "
        f"{start_up_ms:.3g} ms to start"
    )
