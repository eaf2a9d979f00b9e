"""Lightning: a callback that watches a training and writes its data file.

https://lightning.ai/docs/pytorch/stable/extensions/callbacks.html
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from graphkeep._watch._watch import watch
from graphkeep.integrations._trainer import Training

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names, with classes of their own


def _import() -> Any:
    """The one that the program uses; else the one that is installed."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ModuleNotFoundError(
        "graphkeep.integrations.lightning needs Lightning, which is not installed\n  write instead: pip install lightning",
        name="lightning",
    )


_lightning = _import()
_Callback: Any = _lightning.Callback


class Watch(_Callback):  # type: ignore[misc] # Lightning is not looked into
    """Watch every fit of a Lightning trainer, and write one data file for each and each rank.

    A step ends with the batch in which an optimizer stepped: the batches of ``accumulate_grad_batches=4`` are one step, and two
    optimizers in one batch are one step. Without optimizers each batch is one. The results are those of a fit without it.

    At the end three lines say what was found, through Lightning's own log, and name the file for `graphkeep report`.

    Arguments:
        file: a path. With several ranks, ``.rank0`` and so on stands before its suffix. None:
            ``lightning.<pid>.graphkeep`` in the trainer's `default_root_dir`.

    Attributes:
        watch: the `gk.watch()` of the last fit; None before.
        path: of its data file; None before.

    Raises:
        ArgumentError: when a fit begins: the file cannot be written.

    Example::

        from lightning.pytorch import Trainer
        from graphkeep.integrations.lightning import Watch

        Trainer(callbacks=[Watch()]).fit(model, loader)

    Source: `lightning.pytorch.Callback`.
    """

    def __init__(self, file: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.file = file
        self._training: Training | None = None
        self._steps = 0

    @property
    def watch(self) -> watch | None:
        """The `gk.watch()` of the last fit."""
        return None if self._training is None else self._training.watch

    @property
    def path(self) -> os.PathLike[str] | None:
        """The data file of the last fit."""
        return None if self._training is None else self._training.path

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """For Lightning."""
        self._end()
        self._training = Training(
            "lightning", self.file, trainer.default_root_dir, trainer.global_rank, trainer.world_size, self
        )
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """For Lightning."""
        if self._training is not None and trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._training.watch.step()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """For Lightning."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """For Lightning."""
        self._end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """For Lightning."""
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        if self._training is not None:
            self._training.end(error, _say)

    def __getstate__(self) -> dict[str, Any]:
        # a copy, here or in the process of another rank, watches for itself
        return {**self.__dict__, "_training": None}


def _say(text: str) -> None:
    import_module(f"{_lightning.__name__}.utilities.rank_zero").rank_zero_info(text)
