"""Hugging Face's `Trainer`: a callback that watches a training and writes its data file.

https://huggingface.co/docs/transformers/main_classes/callback
"""

from __future__ import annotations

import os
from typing import Any

from graphkeep._watch._watch import watch
from graphkeep.integrations._trainer import Training

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "graphkeep.integrations.huggingface needs transformers, which is not installed\n"
        "  write instead: pip install 'transformers[torch]'",
        name="transformers",
    ) from None


class Watch(TrainerCallback):  # type: ignore[misc] # transformers is not looked into
    """Watch every training of a Hugging Face `Trainer`, and write one data file for each and each rank.

    A step is one of the trainer's: the batches of ``gradient_accumulation_steps=4`` are one. The results are those of a
    training without it. At the end three lines say what was found, through the logger ``graphkeep``, and name the file for
    `graphkeep report`.

    The trainer tells its callbacks nothing of an exception. After one the watch goes on until the next training, `stop()`, the
    end of the callback (with the trainer that has it), or that of the interpreter, whichever is first; then hooks are off and
    the file is closed.

    Arguments:
        file: a path. With several ranks, ``.rank0`` and so on stands before its suffix. None:
            ``huggingface.<pid>.graphkeep`` in the trainer's `output_dir`.

    Attributes:
        watch: the `gk.watch()` of the last training; None before.
        path: of its data file; None before.

    Raises:
        ArgumentError: when a training begins: the file cannot be written.

    Example::

        from transformers import Trainer
        from graphkeep.integrations.huggingface import Watch

        Trainer(model, args, train_dataset=data, callbacks=[Watch()]).train()

    Source: `transformers.TrainerCallback`.
    """

    def __init__(self, file: str | os.PathLike[str] | None = None) -> None:
        self.file = file
        self._training: Training | None = None

    @property
    def watch(self) -> watch | None:
        """The `gk.watch()` of the last training."""
        return None if self._training is None else self._training.watch

    @property
    def path(self) -> os.PathLike[str] | None:
        """The data file of the last training."""
        return None if self._training is None else self._training.path

    def stop(self) -> None:
        """End the watch of a training that raised. Stopping twice does nothing."""
        if self._training is not None:
            self._training.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """For the trainer."""
        self.stop()
        folder = args.output_dir or os.curdir
        self._training = Training("huggingface", self.file, folder, args.process_index, args.world_size, self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """For the trainer."""
        if self._training is not None:
            self._training.watch.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """For the trainer."""
        self.stop()

    def __getstate__(self) -> dict[str, Any]:
        # a copy, here or in the process of another rank, watches for itself
        return {**self.__dict__, "_training": None}
