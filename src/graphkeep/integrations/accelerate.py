"""Accelerate: a context that watches a loop of one's own and writes its data file.

https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization
"""

from __future__ import annotations

import os
from typing import Any

from graphkeep._watch._watch import watch
from graphkeep.integrations._trainer import Training

try:
    import accelerate as _accelerate  # noqa: F401 # without it there is no accelerator to be given
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ModuleNotFoundError(
        "graphkeep.integrations.accelerate needs Accelerate, which is not installed\n  write instead: pip install accelerate",
        name="accelerate",
    ) from None


class Watch:
    """Watch the loop in the block, and write one data file for each rank.

    A step ends where a prepared optimizer really steps, that is where the accelerator syncs gradients: the batches of
    ``gradient_accumulation_steps=4`` are one. Of several optimizers the first one that stepped counts. The results are those of
    a loop without it. At the end three lines say what was found, through the logger ``graphkeep``, and name the file for
    `graphkeep report`.

    Arguments:
        accelerator: the `accelerate.Accelerator` of the loop.
        file: a path. With several ranks, ``.rank0`` and so on stands before its suffix. None: ``accelerate.<pid>.graphkeep`` in
            the working directory.

    Attributes:
        watch: the `gk.watch()` of the block; None before.
        path: of its data file; None before.

    Raises:
        ArgumentError: when the block is entered: the file cannot be written.

    Example::

        from accelerate import Accelerator
        from graphkeep.integrations.accelerate import Watch

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with Watch(accelerator):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(criterion(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()

    Source: `accelerate.Accelerator.accumulate`.
    """

    def __init__(self, accelerator: Any, file: str | os.PathLike[str] | None = None) -> None:
        self._accelerator = accelerator
        self.file = file
        self._training: Training | None = None

    @property
    def watch(self) -> watch | None:
        """The `gk.watch()` of the block."""
        return None if self._training is None else self._training.watch

    @property
    def path(self) -> os.PathLike[str] | None:
        """The data file of the block."""
        return None if self._training is None else self._training.path

    def __enter__(self) -> Watch:
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        self._training = Training("accelerate", self.file, os.curdir, rank, world_size, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if self._training is not None:
            self._training.end(error)
