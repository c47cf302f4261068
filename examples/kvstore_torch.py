"""A torch script over a parameter server, with one line added.

mpirun -np 3 python examples/kvstore_torch.py                # two workers and one server
mpirun -np 3 python examples/kvstore_torch.py --updates      # the optimizer runs on the server
mpirun -np 2 python examples/kvstore_torch.py --servers 0    # every rank works and serves

With more ranks than cores, Open MPI also needs --oversubscribe.
"""

import argparse

import torch
from torch import nn

import bytesched
from bytesched.plugins.mpi_kvstore import open_store


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--updates", action="store_true")
    options = parser.parse_args()
    # A server does not come back from here: it serves, and ends when the workers have.
    kv = open_store(servers=options.servers, updates=options.updates)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = bytesched.wrap(optimizer, model, kvstore=kv)

    torch.manual_seed(kv.rank)
    inputs, targets = torch.randn(64, 256), torch.randint(10, (64,))
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    if kv.rank == 0:
        print(f"loss {loss.item():.6f}")
        for name, value in bytesched.stats(optimizer).items():
            print(f"  {name} = {value}")
    bytesched.unwrap(optimizer)
    kv.close()


if __name__ == "__main__":
    main()
