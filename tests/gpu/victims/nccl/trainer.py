"""transformers' Trainer under accelerate: a small random Llama on two ranks (see common.py for the options).

accelerate launch --num_processes 2 trainer.py --record FILE        (or torchrun --nproc-per-node=2)
"""

import os
import tempfile

import torch
from common import Record, device_of, options, same_bits
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

LENGTH, WORDS = 32, 512


class Texts(Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        words = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Recorded(Trainer):
    """Keeps the loss of each step of this rank."""

    def training_step(self, *arguments, **more):
        self.last_loss = super().training_step(*arguments, **more)
        return self.last_loss


class Written(TrainerCallback):
    """Writes it down and ends the training."""

    def __init__(self, record):
        self.record, self.trainer = record, None

    def on_step_end(self, args, state, control, model=None, **_):
        if self.record.step(self.trainer.last_loss.item(), model.parameters()):
            control.should_training_stop = True
        return control


def main():
    chosen = options()
    same_bits()
    gloo = chosen.backend == "gloo"
    arguments = TrainingArguments(
        tempfile.mkdtemp(prefix="trainer-", dir=os.path.dirname(os.path.abspath(chosen.record))), seed=7, report_to=[],
        per_device_train_batch_size=4, max_steps=1 << 20, logging_steps=1 << 20, save_strategy="no", learning_rate=3e-4,
        lr_scheduler_type="constant", dataloader_num_workers=2, disable_tqdm=True, use_cpu=gloo,
        ddp_backend=chosen.backend, gradient_accumulation_steps=2, bf16=not gloo, dataloader_pin_memory=not gloo,
    )  # fmt: skip
    record = Record(chosen, arguments.process_index, device_of(chosen, arguments.local_process_index))
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    written = Written(record)
    trainer = Recorded(LlamaForCausalLM(config), arguments, train_dataset=Texts(), callbacks=[written])
    written.trainer = trainer
    trainer.train()
    record.end()


if __name__ == "__main__":
    main()
