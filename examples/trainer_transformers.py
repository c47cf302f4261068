"""Transformers' Trainer, with one callback added.

torchrun --nproc-per-node 2 examples/trainer_transformers.py
BYTESCHED_ENABLED=0 torchrun --nproc-per-node 2 examples/trainer_transformers.py  # the same weights
"""

import hashlib
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from bytesched.integrations.transformers import SchedulingCallback


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __init__(self, sequences: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocabulary, (sequences, length), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def train(*callbacks: TrainerCallback, steps: int = 20, **options: Any) -> str:
    """Trains a tiny GPT-2, and returns a digest of its weights."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Tokens(512, 32, 512),
            callbacks=list(callbacks),
        )
        trainer.train()
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    callback = SchedulingCallback()
    weights = train(callback)
    if torch.distributed.get_rank() == 0:
        print(f"weights {weights}")
        for name, value in callback.stats.items():
            print(f"  {name} = {value}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
