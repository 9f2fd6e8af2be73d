"""Lightning's Trainer on two ranks, which starts the second one itself (see common.py for the options).

python fit_lightning.py --record FILE        (or torchrun --nproc-per-node=2)
"""

import pytorch_lightning as lightning
import torch
from common import Record, device_of, options, same_bits
from proof_torch import Gpt, Texts, loss_of
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Gpt()

    def training_step(self, words, _):
        return loss_of(self.model, words)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Written(lightning.Callback):
    """Writes each step down and ends the training."""

    def __init__(self, options):
        self.options, self.record = options, None

    def on_train_start(self, trainer, module):
        self.record = Record(self.options, trainer.global_rank, device_of(self.options, trainer.local_rank))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if self.record.step(outputs["loss"].item(), module.parameters()):
            trainer.should_stop = True


def main():
    chosen = options()
    same_bits()
    gloo = chosen.backend == "gloo"
    lightning.seed_everything(7, workers=True, verbose=False)
    loader = DataLoader(Texts(), 8, shuffle=True, num_workers=2, persistent_workers=True, pin_memory=not gloo)
    written = Written(chosen)
    trainer = lightning.Trainer(
        accelerator="cpu" if gloo else "gpu", devices=2, strategy="ddp", max_steps=-1, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, deterministic=True,
        callbacks=[written], min_epochs=0,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    written.record.end()


if __name__ == "__main__":
    main()
