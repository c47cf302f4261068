"""The store itself, wrapped: pushes and pulls that return at once and go by urgency.

mpirun -np 3 python examples/kvstore_pushpull.py      # two workers and one server

With more ranks than cores, Open MPI also needs --oversubscribe.
"""

import torch

import bytesched
from bytesched.plugins.mpi_kvstore import open_store


def main() -> None:
    kv = bytesched.wrap(open_store(servers=1), partition_bytes="256KiB")
    layers = {f"layer{number}": torch.zeros(300_000) for number in range(8)}
    for key, value in layers.items():
        kv.init(key, value)
    for step in range(5):
        for key in reversed(layers):
            gradient = torch.full_like(layers[key], step + kv.rank)
            kv.push(key, gradient)
        for key, value in layers.items():
            kv.pull(key, value)
        for key, value in layers.items():
            kv.wait(key)
            assert (value == 2 * step + 1).all(), "the sum of both workers"
    if kv.rank == 0:
        for name, figure in kv.stats().items():
            print(f"  {name} = {figure}")
    kv.close()


if __name__ == "__main__":
    main()
