"""One training under watch, for the callbacks of the trainers: where its file lies, when it ends, and what is said then."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shlex
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from graphkeep._watch._datafile import DataFile, header
from graphkeep._watch._watch import watch

_log = logging.getLogger("graphkeep")


class Training:
    """A `gk.watch()` that writes a data file, from now until `end`.

    Arguments:
        name: of the trainer, for the file's name.
        file: the path that the program asked for; None: ``<name>.<pid>.graphkeep`` in `folder`.
        folder: made if it is not there.
        rank, world_size: of this process among those that train together. Of several, each has a file of its own.
        owner: if it is collected, or the interpreter ends, before `end` was called, hooks are taken off and the file is closed.

    Raises:
        ArgumentError: the file cannot be written.
    """

    def __init__(
        self,
        name: str,
        file: str | os.PathLike[str] | None,
        folder: str | os.PathLike[str],
        rank: int,
        world_size: int,
        owner: object,
    ) -> None:
        self.path = _path(name, file, Path(folder), rank if world_size > 1 else None)
        data = DataFile(self.path)
        first = header(sys.argv[0] or "python", sys.argv)
        if world_size > 1:
            first |= {"rank": rank, "world_size": world_size}
            first["group"] = first["group"] or f"{os.environ.get('MASTER_PORT', '')}/{_launch()}"
        data.write(first)
        data.flush()
        self.watch = watch(file=data)
        self._finalizer = weakref.finalize(owner, _drop, self.watch, os.getpid())
        self.watch.start()

    def end(self, error: BaseException | None = None, say: Callable[[str], None] | None = None) -> None:
        """Stop, close the file, and say what was found.

        Arguments:
            error: what ended the training.
            say: takes the text. None: the log of graphkeep, as a warning if there is something to mend.
        """
        if self._finalizer.detach() is None:
            return
        if error is None:
            self.watch.stop()
        else:
            self.watch._end("raised", error)
        with contextlib.suppress(Exception):  # the training has ended, and how is not ours to change
            self._say(say)

    def _say(self, say: Callable[[str], None] | None) -> None:
        from graphkeep.report._read import read
        from graphkeep.report._verdict import verdict

        run = read(self.path)
        text = f"{verdict(run)}\n         graphkeep report {shlex.quote(os.fspath(self.path))}"
        if say is not None:
            say(text)
        else:
            _log.log(logging.WARNING if run.findings or run.notes else logging.INFO, "%s", text)


def _drop(running: watch, process: int) -> None:
    """Nobody will end it any more. This may run in the middle of a collection, so nothing is looked at."""
    running._abandon()
    recorder = running.timeline.recorder
    if recorder is not None and process == os.getpid():
        with contextlib.suppress(Exception):
            recorder.end("stopped")


def _path(name: str, file: str | os.PathLike[str] | None, folder: Path, rank: int | None) -> Path:
    mark = "" if rank is None else f".rank{rank}"
    if file is not None:
        path = Path(file)
        return path.with_name(f"{path.stem}{mark}{path.suffix}")
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}.{os.getpid() if rank is None else _launch()}"
    path, number = folder / f"{stem}{mark}.graphkeep", 1
    while path.exists():  # an earlier training of this process
        number += 1
        path = folder / f"{stem}.{number}{mark}.graphkeep"
    return path


def _launch() -> int:
    """A number that the ranks of one launch on this machine have in common: the process that started them.

    That is their parent, but where rank 0 starts the others itself, as Lightning does.
    """
    spawned = "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None
    return os.getpid() if not spawned and os.environ.get("LOCAL_RANK", "0") == "0" else os.getppid()
