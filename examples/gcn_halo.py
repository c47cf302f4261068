"""Full-graph training of a graph convolutional network (GCN) on a synthetic graph.

torchrun --nproc-per-node 2 examples/gcn_halo.py --inside 0.9
torchrun --nproc-per-node 2 examples/gcn_halo.py --plain    # without wrap: the same losses
BYTESCHED_TIMELINE=runs torchrun --nproc-per-node 2 examples/gcn_halo.py
bytesched report runs    # where the time of an epoch goes
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.plugins import graphs

CLASSES = 8


class Data:
    """A stochastic block model: a share ``inside`` of all edges is drawn inside a block.

    Blocks are of equal size, one for each rank; every vertex has an edge to itself, and weights
    are those of a GCN: ``1 / sqrt(degree * degree)``.
    """

    def __init__(self, vertices: int, degree: int, inside: float, blocks: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.block = torch.arange(vertices) * blocks // vertices
        drawn = vertices * degree // 2
        a = torch.randint(vertices, (drawn,), generator=random)
        b = torch.randint(vertices, (drawn,), generator=random)
        sizes = torch.bincount(self.block, minlength=blocks)
        begins = sizes.cumsum(0) - sizes
        near = begins[self.block[a]] + b % sizes[self.block[a]]
        b = torch.where(torch.rand(drawn, generator=random) < inside, near, b)
        itself = torch.arange(vertices)
        self.source = torch.cat([a, b, itself])
        self.target = torch.cat([b, a, itself])
        degrees = torch.bincount(self.target, minlength=vertices).float()
        self.weight = (degrees[self.source] * degrees[self.target]).rsqrt()

    def rows(self, width: int) -> tuple[Tensor, Tensor]:
        """Features of every vertex, and its class, which its neighbours decide."""
        random = torch.Generator().manual_seed(1)
        vertices = len(self.block)
        features = torch.randn(vertices, width, generator=random)
        scores = features @ torch.randn(width, CLASSES, generator=random)
        edges = torch.stack([self.target, self.source])
        neighbours = torch.sparse_coo_tensor(edges, self.weight, (vertices, vertices))
        return features, (neighbours.coalesce() @ scores).argmax(1)


class GCN(nn.Module):
    def __init__(self, partition: graphs.Partition, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                graphs.GraphConv(partition, width, width, is_first=True),
                graphs.GraphConv(partition, width, width),
                graphs.GraphConv(partition, width, CLASSES),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        scores: Tensor = self.layers[-1](x)
        return scores


def train(options: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = Data(options.vertices, options.degree, options.inside, ranks)
    # A rank needs the owners of all vertices, and the edges that end at its own.
    partition = graphs.Partition(data.block, data.source, data.target, data.weight)
    features, classes = (of_all[partition.vertices] for of_all in data.rows(options.width))

    torch.manual_seed(0)
    model = DistributedDataParallel(GCN(partition, options.width))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if not options.plain:
        optimizer = bytesched.wrap(optimizer, model)
    began_s = time.perf_counter()
    for epoch in range(options.epochs):
        optimizer.zero_grad()
        scores = model(features)
        # Gradients are divided by the number of ranks: this sums to the mean of all vertices.
        loss = functional.cross_entropy(scores, classes, reduction="sum")
        loss = loss * ranks / options.vertices
        loss.backward()
        optimizer.step()
        total = torch.stack([loss.detach(), (scores.argmax(1) == classes).sum()])
        dist.all_reduce(total)
        if rank == 0 and (epoch % 10 == 9 or epoch == options.epochs - 1):
            mean, right = (total / torch.tensor([ranks, options.vertices])).tolist()
            print(
                f"epoch {epoch + 1} loss {mean:.6f}, {right:.1%} right, "
                f"after {time.perf_counter() - began_s:.1f} s",
                flush=True,
            )
    if not options.plain:
        bytesched.unwrap(optimizer)
    if rank == 0:
        print(f"{partition!r}, {model.module.layers[1]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vertices", type=int, default=20_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--inside", type=float, default=0.9, help="share of edges inside blocks")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="without bytesched.wrap")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(parser.parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
