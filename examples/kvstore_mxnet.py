"""A Gluon trainer on MXNet's parameter server, with the one line added.

"$(./scripts/mxnet-venv)" examples/kvstore_mxnet.py     # a server and two workers on this machine

With ``--one`` it is one process of a job that something else starts and tells its ``DMLC_ROLE``.
"""

import socket
import subprocess
import sys

import bytesched
from bytesched.environment import child_environment

STEPS = 20
BATCH = 32


def train() -> None:
    import mxnet as mx
    from mxnet import autograd, gluon

    mx.random.seed(0)
    net = gluon.nn.HybridSequential()
    for width in (512, 512, 512, 10):
        net.add(gluon.nn.Dense(width, activation=None if width == 10 else "relu"))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    kv = mx.kv.create("dist_sync")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
    bytesched.wrap(trainer)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    x = mx.nd.random.uniform(shape=(BATCH, 64))
    y = x.sum(axis=1) % 10
    for step in range(STEPS):
        with autograd.record():
            loss = loss_function(net(x), y.floor())
        loss.backward()
        trainer.step(kv.num_workers * BATCH)
        if step % 5 == 4 and kv.rank == 0:
            print(f"step {step + 1}: loss {loss.mean().asscalar():.4f}", flush=True)
    # MXNet can hang if a store is left while something is under way.
    mx.nd.waitall()
    if kv.rank == 0:
        for name, figure in bytesched.stats(trainer).items():
            print(f"  {name} = {figure}")


def start_all() -> int:
    """Starts a scheduler, a server and two workers; returns the exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--one"],
            env=child_environment({**cluster, "DMLC_ROLE": role}),
        )
        for role in ("scheduler", "server", "worker", "worker")
    ]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    if "--one" in sys.argv:
        # In a scheduler and a server, importing MXNet is all: it serves until the workers end.
        train()
    else:
        sys.exit(start_all())
