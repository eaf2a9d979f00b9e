"""Callbacks of the trainers: the same results, a file that can be read, and what leaks is named."""

import copy
import gc
import importlib
import logging
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader, Dataset, TensorDataset

from graphkeep._ledger import LEDGER
from graphkeep.integrations._trainer import Training
from graphkeep.report._read import read, read_all

pytestmark = [
    pytest.mark.usefixtures("heap_of_its_own"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)


# Lightning


def fit(kind: str, watch: Any = None, **options: Any) -> Any:
    """A module after sixteen batches."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.outputs: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = (self.net(x) - y).pow(2).mean()
            if kind == "leaks":
                self.outputs.append(loss)
            if kind == "fails" and index == 3:
                raise ValueError("own")
            return loss

        def on_train_epoch_end(self) -> None:
            if kind == "leaks":
                torch.stack(self.outputs).mean()

        def configure_optimizers(self) -> Any:
            return None if kind == "has no optimizer" else torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=watch, **quiet, **options)
    trainer.fit(module, batches())
    return module


@pytest.fixture
def lightning_watch() -> type[Any]:
    from graphkeep.integrations.lightning import Watch

    return Watch


def test_a_lightning_fit_has_the_same_results_and_no_finding(lightning_watch: type[Any], tmp_path: Path):
    watch = lightning_watch()
    assert watch.watch is None
    assert same(fit("is well"), fit("is well", watch))
    assert watch.watch.findings == []
    assert LEDGER.listeners == ()
    (file,) = tmp_path.glob("lightning.*.graphkeep")
    run = read(file)
    assert Path(watch.path) == file
    assert (run.how, run.steps_done, run.boundary, run.findings) == ("stopped", 16, "own", [])


def test_a_lightning_module_that_keeps_its_losses_is_named(lightning_watch: type[Any], caplog: pytest.LogCaptureFixture):
    watch = lightning_watch("run.graphkeep")
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(caplog.handler)
    try:
        module = fit("leaks", watch)
    finally:
        logger.removeHandler(caplog.handler)
    assert len(module.outputs) == 16
    (finding,) = read(Path("run.graphkeep")).findings
    assert finding.id == "GK102"
    assert "outputs[0..15]" in finding.what
    assert finding.instead.startswith("`self.outputs.append(loss.detach())`")
    assert "verdict: GK102 nodes grow" in caplog.text
    assert "graphkeep report run.graphkeep" in caplog.text


def test_batches_whose_gradients_are_added_up_are_one_step(lightning_watch: type[Any]):
    watch = lightning_watch()
    fit("is well", watch, accumulate_grad_batches=4)
    assert read(watch.path).steps_done == 4


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer.*:UserWarning")
def test_without_an_optimizer_every_batch_is_a_step(lightning_watch: type[Any]):
    watch = lightning_watch()
    fit("has no optimizer", watch)
    assert read(watch.path).steps_done == 16


def test_a_lightning_fit_that_raises_ends_the_file_and_the_next_has_its_own(lightning_watch: type[Any], tmp_path: Path):
    watch = lightning_watch()
    with pytest.raises(ValueError, match="own"):
        fit("fails", watch)
    assert LEDGER.listeners == ()
    first = watch.path
    assert (read(first).how, read(first).error) == ("raised", "ValueError: own")
    fit("is well", watch, limit_train_batches=2)
    assert watch.path != first
    assert len(list(tmp_path.glob("*.graphkeep"))) == 2


def test_a_lightning_watch_can_be_copied_and_pickled(lightning_watch: type[Any]):
    watch = lightning_watch("a.graphkeep")
    for copied in (copy.deepcopy(watch), pickle.loads(pickle.dumps(watch))):
        assert (copied.file, copied.watch, copied.path) == ("a.graphkeep", None, None)
    fit("is well", watch, limit_train_batches=2)
    assert copy.deepcopy(watch).watch is None
    assert watch.state_dict() == {}


# Hugging Face


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 100, (4,), generator=numbers), "labels": index % 2}


def train(kind: str, watch: Any = None, **options: Any) -> Any:
    """A trainer after a training of sixteen batches."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class Own(Trainer):
        total: Any = 0.0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if kind == "leaks":
                self.total += loss
            if kind == "fails" and self.state.global_step == 3:
                raise ValueError("own")
            return loss

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100)
    )
    arguments = TrainingArguments(
        "out",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        **options,
    )
    trainer = Own(model, arguments, train_dataset=Sentences(), callbacks=[watch] if watch is not None else [])
    trainer.train()
    return trainer


@pytest.fixture
def huggingface_watch() -> Iterator[type[Any]]:
    from accelerate.state import AcceleratorState

    from graphkeep.integrations.huggingface import Watch

    AcceleratorState._reset_state(True)
    yield Watch
    AcceleratorState._reset_state(True)


def test_a_hugging_face_training_has_the_same_results_and_no_finding(huggingface_watch: type[Any], tmp_path: Path):
    watch = huggingface_watch()
    assert same(train("is well").model, train("is well", watch).model)
    assert watch.watch.findings == []
    assert LEDGER.listeners == ()
    (file,) = tmp_path.glob("out/huggingface.*.graphkeep")
    assert tmp_path / watch.path == file
    run = read(file)
    assert (run.how, run.steps_done, run.boundary, run.findings) == ("stopped", 16, "own", [])


def test_a_trainer_that_adds_up_its_losses_is_named(huggingface_watch: type[Any], caplog: pytest.LogCaptureFixture):
    watch = huggingface_watch("run.graphkeep")
    trainer = train("leaks", watch)
    assert trainer.total.grad_fn is not None
    (finding,) = read(Path("run.graphkeep")).findings
    assert finding.id == "GK102"
    assert "total" in finding.what
    assert finding.instead.startswith("`self.total += loss.detach()`")
    (record,) = [record for record in caplog.records if record.name == "graphkeep"]
    assert record.levelno == logging.WARNING
    assert "graphkeep report run.graphkeep" in record.message


def test_the_batches_of_an_accumulated_step_are_one(huggingface_watch: type[Any]):
    watch = huggingface_watch()
    train("is well", watch, gradient_accumulation_steps=4)
    assert read(watch.path).steps_done == 4


def test_a_training_that_raised_is_watched_no_longer_than_its_trainer_lives(huggingface_watch: type[Any]):
    watch = huggingface_watch()
    with pytest.raises(ValueError, match="own"):
        train("fails", watch)
    seen, path, alive = watch.watch, watch.path, weakref.ref(watch)
    assert LEDGER.listeners == (seen,)
    del watch
    gc.collect()
    assert alive() is None
    assert LEDGER.listeners == ()
    assert not optimizer_module._global_optimizer_post_hooks
    run = read(path)
    assert (run.how, run.steps_done, run.unread) == ("stopped", 3, 0)


def test_or_no_longer_than_until_it_is_stopped_or_trains_again(huggingface_watch: type[Any]):
    watch = huggingface_watch()
    for _ in range(2):
        with pytest.raises(ValueError, match="own"):
            train("fails", watch)
        assert len(LEDGER.listeners) == 1
    watch.stop()
    watch.stop()
    assert LEDGER.listeners == ()
    assert read(watch.path).how == "stopped"


# Accelerate


@pytest.fixture
def accelerator() -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(True)


def loop(accelerator: Any, watch: Any = None, keep: list[Any] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = net()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if keep is not None:
                keep.append(loss)
    return model


def test_a_loop_of_accelerate_s_has_the_same_results_and_a_step_is_where_gradients_are_synced(accelerator: Any, tmp_path: Path):
    from graphkeep.integrations.accelerate import Watch

    plain = loop(accelerator)
    with Watch(accelerator) as watch:
        assert same(plain, loop(accelerator, watch))
    assert watch.watch.findings == []
    assert LEDGER.listeners == ()
    (file,) = tmp_path.glob("accelerate.*.graphkeep")
    assert (read(file).how, read(file).steps_done, read(file).boundary) == ("stopped", 8, "optimizer")


def test_a_list_of_losses_in_a_loop_of_accelerate_s_is_named(accelerator: Any):
    from graphkeep.integrations.accelerate import Watch

    losses: list[Any] = []
    with Watch(accelerator, "run.graphkeep") as watch:
        loop(accelerator, watch, losses)
    assert {finding.id for finding in read(Path("run.graphkeep")).findings} == {"GK102"}
    assert "losses[0..15]" in watch.watch.findings[0].what


def test_a_loop_that_raises_ends_the_file_and_raises(accelerator: Any):
    from graphkeep.integrations.accelerate import Watch

    with pytest.raises(ValueError, match="own"), Watch(accelerator, "run.graphkeep"):
        raise ValueError("own")
    assert LEDGER.listeners == ()
    assert read(Path("run.graphkeep")).error == "ValueError: own"


# all of them


def test_each_rank_has_a_file_of_its_own_and_they_are_read_as_one_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    owner = nn.Module()
    for file, name in ((None, "lightning.*.rank{}.graphkeep"), ("run.graphkeep", "run.rank{}.graphkeep")):
        for rank in range(2):
            Training("lightning", file, tmp_path, rank, 2, owner).end()
        paths = [path for rank in range(2) for path in tmp_path.glob(name.format(rank))]
        assert [run.rank for run in read_all(paths[:1])] == [0, 1]


def test_a_program_that_ends_in_the_middle_has_its_file_closed(tmp_path: Path):
    code = (
        "from graphkeep.integrations._trainer import Training\nclass Owner: pass\nowner = Owner()\n"
        "training = Training('huggingface', 'cut.graphkeep', '.', 0, 1, owner)\nraise SystemExit(4)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 4
    assert read(tmp_path / "cut.graphkeep").how == "stopped"


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("lightning", "pip install lightning"),
        ("huggingface", r"pip install 'transformers\[torch\]'"),
        ("accelerate", "pip install accelerate"),
    ],
)
def test_a_library_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, library: str, command: str):
    for name in ("lightning.pytorch", "pytorch_lightning", "transformers", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"graphkeep.integrations.{library}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"write instead: {command}"):
        importlib.import_module(f"graphkeep.integrations.{library}")
