"""Full-graph training of a graph that ranks share out, with the results of one process.

Rows of neighbours on other ranks, the halo, arrive in pieces while inner rows are aggregated, as
NGra streams chunks of a graph (Ma et al., USENIX ATC 2019).
"""

from __future__ import annotations

from .layer import GraphConv, aggregate
from .partition import Partition

__all__ = ["GraphConv", "Partition", "aggregate"]
