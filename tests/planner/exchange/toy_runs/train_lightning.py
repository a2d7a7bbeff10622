"""The exported Trainer of Lightning with our callback, on the exported script's model and data."""

from lightning_model import LanguageModel, rows
from lightning_trainer import make_loader, make_trainer

from planner.callbacks.lightning import LightningPreflight

trainer = make_trainer()
trainer.fit_loop.max_epochs = 1
trainer.callbacks.append(LightningPreflight(record="runs.csv"))
trainer.fit(LanguageModel(), make_loader(rows()))
