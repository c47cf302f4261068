"""Mixture of experts: an all-to-all that gradients make way for, gates, and a layer over both.

`MoE` cuts its exchange into pieces, so that experts compute on one while the next is on its way
(Tutel, Hwang et al., MLSys 2023; FasterMoE, He et al., PPoPP 2022). `DTSGate` is the gate of EvoMoE
(Nie et al., 2021), dense at first and sparse later; only what it keeps is sent.
"""

from __future__ import annotations

from .exchange import exchange
from .gates import DTSGate, Temperature, TopKGate
from .gradients import (
    Grid,
    clip_grad_norm_,
    data_parallel,
    expert_groups,
    full_state_dict,
    own_experts,
    reduce_expert_gradients,
)
from .layer import MoE

__all__ = [
    "DTSGate",
    "Grid",
    "MoE",
    "Temperature",
    "TopKGate",
    "clip_grad_norm_",
    "data_parallel",
    "exchange",
    "expert_groups",
    "full_state_dict",
    "own_experts",
    "reduce_expert_gradients",
]
