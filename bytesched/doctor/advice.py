"""What to do about each reason why little crosses the barrier, or why a line of a script waits.

The page "What makes a script wait" has the same table, which is made of this one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Advice:
    """A reason as ``stats()`` and the last line of `bytesched run` give it, and what to do."""

    #: a regular expression
    pattern: str
    #: as a page shows it
    shown: str
    #: why it waits
    happens: str
    #: what to do
    cure: str


ADVICE: Final = (
    Advice(
        r"reads all gradients",
        "`clip_grad_norm_ reads all gradients (train.py:88)`",
        "that line needs values of gradients before `step()`, so it waits for them",
        'with DDP on two ranks over Gloo on CPUs, try `split="on"`: norms, sums and maxima of '
        "whole gradients then wait for half of what is sent; read other values less often",
    ),
    Advice(
        r"asks for norms of all gradients",
        "`clip_grad_norm_ asks for norms of all gradients (train.py:88)`",
        "gradients go in two halves, and a norm waits for the first half of what is sent",
        "nothing; if compute is much longer than communication, that half is all there is to wait "
        "for",
    ),
    Advice(
        r"reads gradients of \S+(,| and) ",
        "`the script reads gradients of fc.weight, fc.bias (train.py:90)`",
        "gradients are read one by one, for a log of each or to compute with them",
        "to divide or scale them, divide or scale the loss, or use `div_` and `mul_` with numbers; "
        "log every hundredth step",
    ),
    Advice(
        r"reads (?!all )\S+",
        "`the script reads fc.weight.grad (train.py:90)`",
        "one gradient is read, for a log for instance",
        "log every hundredth step, or what is there already, such as the loss",
    ),
    Advice(
        r"a fused step under GradScaler",
        "`a fused step under GradScaler`",
        "the scale is taken away after `step()`",
        "`fused=False`",
    ),
    Advice(
        r"is not known to update each parameter",
        "`SAM is not known to update each parameter on its own`, or another class",
        "the update of one parameter may depend on others, so all updates happen at once",
        "read its source: if it keeps the promises listed for `bytesched.separable(cls)`, vouch "
        "for it",
    ),
    Advice(
        r"the memory of \S+ is used elsewhere",
        "`the memory of 'fc.weight' is used elsewhere, too`",
        "another tensor, module, process, or a graph that was not run backward has the memory of a "
        "parameter, and could read weights that are not updated yet: all updates happen at once",
        "let go of it before `step()`, or give it a copy, which `state_dict()` is not",
    ),
    Advice(
        r"has been replaced|is a function of another module",
        "`step of this SGD has been replaced`, or another method",
        "code that nobody has read may make one update depend on others",
        "move it into your own class, and vouch for that: `bytesched.separable(cls)`",
    ),
    Advice(
        r"step\(\) was called with arguments",
        "`step() was called with arguments`",
        "later updates would not get them",
        "put them into the parameter groups",
    ),
    Advice(
        r"a parameter group holds",
        "`a parameter group holds 'schedule', a function, ...`",
        "its value may have changed by the time of the update",
        "put a number or a tensor there before each step",
    ),
    Advice(
        r"a pre-hook of step",
        "`a pre-hook of step() was registered after the wrap`",
        "it runs after the hook of bytesched, and may change gradients",
        "register it before `bytesched.wrap`",
    ),
    Advice(
        r"a torch function or dispatch mode",
        "`a torch function or dispatch mode around step()`",
        "a mode only sees operations of its own thread",
        "exit the mode before `step()`",
    ),
    Advice(
        r"step\(closure\)",
        "`step(closure)`",
        "the step hooks or the class do not allow calling the closure before the update",
        "compute the loss outside",
    ),
    Advice(
        r"cross_barrier is off",
        "`cross_barrier is off`",
        "a setting",
        "remove it",
    ),
    Advice(
        r"torch\.compile was applied after",
        "`torch.compile was applied after bytesched.wrap` (in the log)",
        "gates would be inside compiled code",
        "compile before `bytesched.wrap`",
    ),
    Advice(
        r"communication is hidden|had arrived before step",
        "`communication is hidden behind backward already`",
        "gradients are there when `step()` is called",
        "no gain here: nothing waits for this link, and plain DDP is as fast",
    ),
    Advice(
        r"a backward pass begins",
        "`a backward pass begins while the last one is still being sent (train.py:87)`",
        "new gradients need the memory of the previous ones",
        "nothing, unless weights are hardly used in forward: the link is the limit",
    ),
    Advice(
        r"uses the weights of",
        "`the forward pass uses the weights of fc (train.py:85)`",
        "the weights of this module are used first and arrive last",
        "nothing: the link is the limit, see what can be gained",
    ),
    Advice(
        r"uses (?!the weights of)\S+ .*after step",
        "`the script uses fc.weight after step() (train.py:93)`",
        "some code reads weights right after `step()`: a moving average, a log of their norms",
        "do it every hundredth step, or after the next forward pass",
    ),
    Advice(
        r"needs all weights",
        "`the script needs all weights (train.py:95)`",
        "evaluation, a checkpoint or the end of the script needs every update",
        "nothing, unless it happens at every step",
    ),
)


def advice_for(reason: str) -> Advice | None:
    """What is known about a reason, if anything is."""
    return next((advice for advice in ADVICE if re.search(advice.pattern, reason)), None)
