"""What `test_wrapped.py` runs on two ranks: ``python -m torch.distributed.run --nproc-per-node 2 wrapped_programs.py NAME...``.

What a model that is wrapped for several processes can bear, and what is refused before a gradient has changed: forwards in
between, two cuts, two inferences, functions around a wrapper, collectives in the forward, layouts of FSDP2, tensor parallel.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import launched
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from test_docs import ROOT, blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, mse_loss, normalize, softplus
from torch.nn.parallel import DistributedDataParallel

import graphkeep as gk
from graphkeep._boundary import open_trunks

ROWS = [0, 4], [1, 2, 5]  # of each rank
Outputs = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    """A trunk and two heads; `ran` counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 4)
        self.cut: gk.cut[Tensor] | None = None
        self.ran = 0

    def forward(self, x: Tensor, cutting: bool = False) -> Outputs:
        self.ran += 1
        h = self.trunk(x)
        if cutting:
            self.cut = gk.cut(h)
            h = self.cut.stand_ins
        return h, self.first(h).tanh(), self.second(h).square()


class OneHead(Net):
    """Nothing below the cut is trained, and the head's weights serve two outputs."""

    def __init__(self) -> None:
        super().__init__()
        del self.second
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor, cutting: bool = False) -> Outputs:
        h = self.trunk(x)
        return h, self.first(h).tanh(), self.first(2 * h).square()


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(dist.get_world_size(), 6, 6, generator=torch.Generator().manual_seed(number))[rank]


def mine(number: int = 0) -> Tensor:
    return batch(dist.get_rank(), number)


def losses(outputs: Outputs, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
    return outputs[1][rows].sum(), outputs[2][rows].sum()


def joint(model: Callable[[Tensor], Outputs], x: Tensor) -> None:
    first, second = losses(model(x))
    (first + second).backward()


def gradients(net: nn.Module | list[nn.Parameter]) -> list[Tensor | None]:
    found = [parameter.grad for parameter in (net.parameters() if isinstance(net, nn.Module) else net)]
    wholes = [grad.full_tensor() if grad is not None and hasattr(grad, "full_tensor") else grad for grad in found]
    return [None if grad is None else grad.detach().clone() for grad in wholes]


def assert_same(ours: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    assert [grad is None for grad in ours] == [grad is None for grad in wanted]
    for one, other in zip(ours, wanted, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def alone(net: nn.Module, loss: Callable[[Any, int], Tensor]) -> list[Tensor | None]:
    """The gradients of one process with the batches of all ranks; the wrappers divide their sum by the number of ranks."""
    twin, ranks = copy.deepcopy(net), dist.get_world_size()
    for rank in range(ranks):
        (loss(twin, rank) / ranks).backward()
    return gradients(twin)


def alone_joint(net: nn.Module) -> list[Tensor | None]:
    return alone(net, lambda twin, rank: sum(losses(twin(batch(rank)))))


def collectives() -> int:
    group: Any = dist.distributed_c10d._get_default_group()
    return group._get_sequence_number_for_group()


def counted(function: Callable[[], object]) -> int:
    """How many collectives it calls."""
    before = collectives()
    function()
    return collectives() - before


@contextlib.contextmanager
def refused(net: nn.Module, says: str, *, before_it_runs: bool = False) -> Iterator[None]:
    """On every rank; no gradient has changed, and nothing is open."""
    parameters = list(net.parameters())  # those that FSDP2 shards; in a forward that has been left the whole ones are in place
    before, ran = gradients(parameters), getattr(net, "ran", 0)
    with pytest.raises(gk.ArgumentError, match=says):
        yield
    for one, other in zip(gradients(parameters), before, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert not before_it_runs or getattr(net, "ran", 0) == ran
    assert not open_trunks.trunks


def assert_a_plain_step_is_right(model: Any, net: nn.Module, wanted: list[Tensor | None]) -> None:
    net.zero_grad()
    joint(model, mine())
    assert_same(gradients(net), wanted)


# backward(keep=) --------------------------------------------------------------------------------------------------------------


def keep_and_a_forward_in_between() -> None:
    """Without a gradient, or not to be synchronised: DDP waits all the same for the one before."""

    def evaluates(ddp: Any) -> None:
        with torch.no_grad():
            ddp(mine(1))

    def accumulates(ddp: Any) -> None:
        with ddp.no_sync():
            ddp(mine(1))

    for between in evaluates, accumulates:
        net = Net()
        wanted, ddp = alone_joint(net), DistributedDataParallel(net)
        for _ in range(2):
            outputs = ddp(mine())
            between(ddp)
            with refused(net, r"keep=\) on a DistributedDataParallel model"):
                gk.backward(losses(outputs)[0], keep=outputs[0])
            assert_a_plain_step_is_right(ddp, net, wanted)
        # the way that the refusal names: no forward of the step is to be synchronised
        net.zero_grad()
        with ddp.no_sync():
            outputs = ddp(mine())
            between(ddp)
            gk.backward(losses(outputs)[0], keep=outputs[0])
            losses(outputs)[1].backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        assert_same(gradients(net), wanted)


def keep_of_frozen_objects() -> None:
    """`gc.freeze` takes a wrapper out of what the collector knows: one that has been found, one that has not, and a third."""
    for times, refused_before in (1, False), (1, True), (2, False):
        for _ in range(times):
            net = Net()
            wanted, ddp = alone_joint(net), DistributedDataParallel(net)
            outputs = ddp(mine())
            if refused_before:
                with refused(net, r"keep="):
                    gk.backward(losses(outputs)[0], keep=outputs[0])
            gc.collect()
            gc.freeze()
            try:
                with refused(net, r"keep="):
                    gk.backward(losses(outputs)[0], keep=outputs[0])
                assert_a_plain_step_is_right(ddp, net, wanted)
            finally:
                gc.unfreeze()
            gone = weakref.ref(outputs[0])
            del ddp, outputs
            gc.collect()  # so that fewer are frozen the next time
            assert gone() is None, "what has looked for the wrapper keeps what was in the frame"


def keep_and_a_head_used_twice() -> None:
    """No leaf lies below what is kept, and still one would have its gradient in two backwards."""
    net = OneHead()
    wanted, ddp = alone_joint(net), DistributedDataParallel(net)
    outputs = ddp(mine().requires_grad_())
    with refused(net, r"keep="):
        gk.backward(losses(outputs)[0], keep=outputs[0])
    assert_a_plain_step_is_right(ddp, net, wanted)


# cut --------------------------------------------------------------------------------------------------------------------------


def two_cuts() -> None:
    """Of two forwards of one model; one cut of both is right, and reduces as often as a plain step."""
    net = Net().trunk

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T).tanh().sum()

    wanted = alone(net, lambda twin, rank: loss(twin(batch(rank)), twin(batch(rank, 1))))
    ddp = DistributedDataParallel(net)

    def plain() -> None:
        loss(ddp(mine()), ddp(mine(1))).backward()

    def one_cut() -> None:
        with gk.cut((ddp(mine()), ddp(mine(1)))) as (a, b):
            loss(a, b).backward()

    plain()
    for _ in range(2):
        net.zero_grad()
        first, second = ddp(mine()), ddp(mine(1))
        with refused(net, "two cuts on one DistributedDataParallel model"):
            with gk.cut(first) as a, gk.cut(second) as b:
                loss(a, b).backward()
        del first, second
        net.zero_grad()
        often = counted(plain)
        assert_same(gradients(net), wanted)
        net.zero_grad()
        assert counted(one_cut) == often
        assert_same(gradients(net), wanted)


def cut_and_a_shared_head() -> None:
    """It is the second head's backward that is refused. DDP says in its next forward that the step has not ended."""
    net = Net()
    net.second = net.first
    wanted, ddp = alone_joint(net), DistributedDataParallel(net)
    first, second = losses(ddp(mine(), cutting=True))
    first.backward()
    with pytest.raises(gk.ArgumentError, match="shared by two heads"):
        second.backward()
    assert net.first.weight.grad is not None
    assert net.trunk[0].weight.grad is None
    net.cut = None
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp(mine())

    # under no_sync, with the sum over the ranks made once
    net.zero_grad()
    ddp = DistributedDataParallel(net)
    with ddp.no_sync():
        for loss in losses(ddp(mine(), cutting=True)):
            loss.backward()
        assert net.cut is not None
        net.cut.close()
    for parameter in net.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    assert_same(gradients(net), wanted)


def critics_and_a_generator() -> None:
    """The recipe of a GAN: each model in a wrapper of its own, the critics step while the generator's cut is open."""

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, n)) for n in (6, 1, 1)]

    def step(models: list[Any], data: list[tuple[Tensor, Tensor]], cutting: bool) -> None:
        generator, *critics = models
        optimizers = [torch.optim.SGD(critic.parameters(), lr=0.1) for critic in critics]
        generator.zero_grad()
        made = [generator(noise) for noise, _ in data]
        with gk.cut(made) if cutting else contextlib.nullcontext(made) as fakes:
            for critic, optimizer in zip(critics, optimizers, strict=True):
                optimizer.zero_grad()
                for fake, (_, real) in zip(fakes, data, strict=True):
                    (softplus(-critic(real)).mean() / len(data)).backward()
                    (softplus(critic(fake.detach())).mean() / len(data)).backward()
                optimizer.step()
            parts = [softplus(-critic(fake)).mean() / len(data) for fake in fakes for critic in critics]
            if not cutting:
                torch.stack(parts).sum().backward()
            for part in parts if cutting else ():
                part.backward()

    ours, theirs = build(), build()
    wrapped = [DistributedDataParallel(model) for model in ours]
    for number in range(3):
        step(wrapped, [(mine(number), mine(number + 10))], True)
        step(theirs, [(batch(rank, number), batch(rank, number + 10)) for rank in range(dist.get_world_size())], False)
        assert_same(gradients(ours[0]), gradients(theirs[0]))
        for one, other in zip(ours[1:], theirs[1:], strict=True):
            for a, b in zip(one.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# infer ------------------------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.image = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, x: Tensor, tower: str) -> Tensor:
        return getattr(self, tower)(x)


def two_inferences() -> None:
    """Of two towers in one wrapper, and one backward through both; the losses meet in one product, or lie apart."""

    def together(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T).tanh().sum()

    def apart(a: Tensor, b: Tensor) -> Tensor:
        return a.square().sum() + b.tanh().sum()

    for loss in together, apart:
        net = Towers()
        wanted = alone(net, lambda twin, rank: loss(twin(batch(rank), "text"), twin(batch(rank, 1), "image")))  # noqa: B023
        for options in {}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-5}:
            net.zero_grad()
            ddp = DistributedDataParallel(net, **options)

            def plain() -> None:
                loss(ddp(mine(), "text"), ddp(mine(1), "image")).backward()  # noqa: B023

            def inferred() -> None:
                a = gk.infer(ddp, mine(), "text", chunk_size=2 + dist.get_rank())  # noqa: B023
                b = gk.infer(ddp, mine(1), "image", chunk_size=3)  # noqa: B023
                loss(a[:], b[:]).backward()  # noqa: B023

            if "find_unused_parameters" in options:
                often = None  # two plain forwards look at the outputs of the second only
            else:
                plain(), plain()  # buckets are built anew once
                net.zero_grad()
                often = counted(plain)
                assert_same(gradients(net), wanted)
            for _ in range(3):
                net.zero_grad()
                found = counted(inferred)
                assert often is None or found == often
                assert_same(gradients(net), wanted)


def inferences_one_after_the_other() -> None:
    """Two backwards for one inference, or for two of other towers: each is synchronised, and looks for its own leaves only."""

    def loss(twin: Any, rank: int) -> Tensor:
        text = twin(batch(rank), "text").sum()
        return text + twin(batch(rank, 1), "image").sum() if number else text

    for number in range(2):
        net = Towers()
        wanted = alone(net, loss)
        for options in {}, {"find_unused_parameters": True}:
            if not (options or number):
                continue  # the other tower would be waited for
            net.zero_grad()
            ddp = DistributedDataParallel(net, **options)
            for _ in range(2):
                net.zero_grad()
                a = gk.infer(ddp, mine(), "text", chunk_size=2)
                heads = [a[:2].sum() + a[2:4].sum(), a[4:].sum()]
                if number:
                    b = gk.infer(ddp, mine(1), "image", chunk_size=3)
                    heads = [sum(heads), b[:].sum()] if options else [sum(heads) + b[:].sum()]
                for head in heads:
                    head.backward()
                assert_same(gradients(net), wanted)


def contrastive_over_all_ranks() -> None:
    """The rows of all ranks meet in one loss: they are gathered after the forward, so each replays its own."""

    def scores_of(a: Tensor, b: Tensor, rank: int) -> Tensor:
        return cross_entropy(normalize(a) @ normalize(b).T, torch.arange(6) + 6 * rank)

    net, rank, ranks = Towers(), dist.get_rank(), dist.get_world_size()
    twin = copy.deepcopy(net)
    images = torch.cat([twin(batch(r, 1), "image") for r in range(ranks)])
    sum(scores_of(twin(batch(r), "text"), images, r) / ranks for r in range(ranks)).backward()  # type: ignore[union-attr]
    one = DistributedDataParallel(net)
    two = DistributedDataParallel(copy.deepcopy(net.text)), DistributedDataParallel(copy.deepcopy(net.image))
    for _ in range(2):
        for a, b, model in (
            (gk.infer(one, mine(), "text", chunk_size=2), gk.infer(one, mine(1), "image", chunk_size=4), net),
            (gk.infer(two[0], mine(), chunk_size=2), gk.infer(two[1], mine(1), chunk_size=4), nn.ModuleList(two)),
        ):
            model.zero_grad()
            everybodys = torch.cat(dist.nn.functional.all_gather(b[:]))
            scores_of(a[:], everybodys, rank).backward()
            assert_same(gradients(model), gradients(twin))


def infer_around_a_wrapper() -> None:
    """A function whose model counts forwards is refused before the model has run."""

    class Holds:
        def __init__(self, model: Any) -> None:
            self.model = model

        def __call__(self, x: Tensor) -> Outputs:
            return self.model(x)

        def run(self, x: Tensor) -> Outputs:
            return self.model(x)

    def data_parallel(net: Net) -> Any:
        return DistributedDataParallel(net)

    def sharded(net: Net) -> Any:
        fully_shard(net.trunk)
        return fully_shard(net)

    for wrap, says in (data_parallel, "runs a DistributedDataParallel model inside"), (sharded, "a module that FSDP shards"):
        net = Net()
        wanted = alone_joint(net)
        model = wrap(net)
        joint(model, mine())
        around: list[Callable[[Tensor], Any]] = [
            lambda x: model(x),  # noqa: B023
            lambda x: model(x)[1:],  # noqa: B023
            functools.partial(model),
            functools.partial(lambda inner, x: inner(x), model),
            model.forward,
            Holds(model),
            Holds(model).run,
            lambda x: [held(x) for held in {"it": model}.values()][0],  # noqa: B023, RUF015
        ]
        for function in around:
            for options in {}, {"chunk_size": 2 + dist.get_rank()}, {"keep": "everything"}:
                with refused(net, says, before_it_runs=True):
                    gk.infer(function, mine(), **options)
        assert_a_plain_step_is_right(model, net, wanted)


def infer_of_a_compiled_wrapper() -> None:
    net = Net()
    wanted = alone_joint(net)
    ddp = DistributedDataParallel(net)
    with refused(net, r"around what torch\.compile returns", before_it_runs=True):
        gk.infer(torch.compile(ddp, backend="eager"), mine(), chunk_size=2)
    assert_a_plain_step_is_right(ddp, net, wanted)


class Together(nn.Module):
    """Normalises with the mean of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return x - dist.nn.functional.all_reduce(x.mean(0)) / dist.get_world_size()


def infer_and_collectives() -> None:
    """Ranks that pick other rows would replay other forwards, and one that picks none would leave the others waiting."""

    class Synchronised(Net):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.trunk.append(norm)

    patch = pytest.MonkeyPatch()  # DDP has SyncBatchNorm on GPUs only
    patch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
    for norm, before_it_runs in (Together(), False), (nn.SyncBatchNorm(8), True):
        net = Synchronised(norm)
        for model in net, DistributedDataParallel(net):
            for options in {}, {"keep": "everything"}, {"chunk_size": 6 - dist.get_rank()}:
                if before_it_runs or "chunk_size" not in options:  # with other chunks on each the forwards would not meet
                    with refused(net, "the ranks run the forward of the model together", before_it_runs=before_it_runs):
                        out = gk.infer(model, mine(), **options)
                        sum(losses(out[[0, 1] if dist.get_rank() == 0 else []])).backward()

    net = Synchronised(nn.SyncBatchNorm(8).eval())
    wanted = alone(net, lambda twin, rank: sum(losses(twin(batch(rank)), ROWS[rank % 2])))
    ddp = DistributedDataParallel(net)
    patch.undo()
    for _ in range(2):
        net.zero_grad()
        outputs = gk.infer(ddp, mine(), chunk_size=2 + dist.get_rank())[ROWS[dist.get_rank() % 2]]
        sum(losses(outputs)).backward()  # type: ignore[union-attr]
        assert_same(gradients(net), wanted)


def infer_decides_when_rows_are_made() -> None:
    """Whether a backward is synchronised is decided where `out[rows]` stands, as it is where a forward of DDP's own stands."""
    net = Net()
    ddp = DistributedDataParallel(net)
    out = gk.infer(ddp, mine())
    with ddp.no_sync():
        outside = out[[0]]
    own = losses(outside)
    assert counted(lambda: sum(own).backward()) == 0  # type: ignore[attr-defined]
    inside = out[[1]]
    with ddp.no_sync():
        assert counted(lambda: sum(losses(inside)).backward()) > 0  # type: ignore[attr-defined]
    assert_same(gradients(net), alone(net, lambda twin, rank: sum(losses(twin(batch(rank)), [0, 1]))))


# FSDP2 ------------------------------------------------------------------------------------------------------------------------


def cut_in_layouts_of_fsdp() -> None:
    """The trunk's weights have to be there when the cut is left, after the heads' backwards."""

    def in_the_root(net: Net) -> None:
        fully_shard(net)

    def heads_only(net: Net) -> None:
        fully_shard(net.first), fully_shard(net.second), fully_shard(net)

    def never_resharded(net: Net) -> None:
        fully_shard(net.trunk, reshard_after_forward=False), fully_shard(net, reshard_after_forward=False)

    def own(net: Net) -> None:
        fully_shard(net.trunk), fully_shard(net)

    def each(net: Net) -> None:
        for part in (net.trunk[0], net.trunk[2], net.first, net.second, net):
            fully_shard(part)

    for shard in in_the_root, heads_only, never_resharded, own, each:
        net = Net()
        wanted = alone_joint(net)
        shard(net)
        optimizer = torch.optim.SGD(net.parameters())
        joint(net, mine())
        for _ in range(2):
            if shard in (own, each):
                net.zero_grad()
                for loss in losses(net(mine(), cutting=True)):
                    loss.backward()
                assert net.cut is not None
                net.cut.close()
                assert_same(gradients(net), wanted)
            else:
                with refused(net, r"FSDP2 \(fully_shard\) lets go of the trunk's weights with the first head's backward"):
                    net(mine(), cutting=True)
            net.cut = None
            optimizer.zero_grad()
            assert_a_plain_step_is_right(net, net, wanted)

    for options in {}, {"reshard_after_forward": True}, {"reshard_after_forward": False}:  # heads outside, the cut as well
        net = Net()
        wanted = alone_joint(net)[: len(list(net.trunk.parameters()))]
        trunk = fully_shard(net.trunk, **options)
        for _ in range(2):
            net.zero_grad()
            with gk.cut(trunk(mine())) as h:
                for loss in net.first(h).tanh().sum(), net.second(h).square().sum():
                    loss.backward()
            assert_same(gradients(net.trunk), wanted)


# tensor parallel --------------------------------------------------------------------------------------------------------------


def tensor_parallel() -> None:
    """All ranks have the same batch and a part of each weight (`DTensor`); what is between the parts is whole, or a part."""

    class Part(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, outputs)

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(self.wide(x).tanh().sigmoid())

    class Split(Net):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.first, self.second = Part(8), Part(4), Part(4)  # type: ignore[assignment]

    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def split(net: Split, between: bool) -> None:
        outer: Any = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        inner = outer
        if between:
            outer = {"wide": ColwiseParallel(), "narrow": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}
            inner = {"wide": ColwiseParallel(input_layouts=Shard(0)), "narrow": RowwiseParallel()}
        parallelize_module(net.trunk, mesh, outer)
        for head in net.first, net.second:
            parallelize_module(head, mesh, inner)

    def keep(net: Split) -> None:
        outputs = net(x)
        gk.backward(losses(outputs)[0], keep=outputs[0])
        losses(outputs)[1].backward()

    def cut(net: Split) -> None:
        for loss in losses(net(x, cutting=True)):
            loss.backward()
        assert net.cut is not None
        net.cut.close()
        net.cut = None

    def budget(net: Split) -> None:
        with gk.budget(1200) as b:
            joint(net, x)
        assert b.peak <= 1200
        assert b.recomputed_ops

    def watch(net: Split) -> None:
        with gk.watch() as w:
            joint(net, x)
        assert w.lives

    def discard(net: Split) -> None:
        loss, _ = losses(net(x))
        assert gk.discard(loss)
        assert gk.explain(loss).state == "freed"
        joint(net, x)

    def explain(net: Split) -> None:
        first, second = losses(net(x))
        found = gk.explain(first + second)
        assert found.saved_bytes
        assert found.state == "alive"
        (first + second).backward()
        assert gk.explain(first).saved_bytes == 0

    net = Split()
    twin = copy.deepcopy(net)
    joint(twin, x)
    wanted = gradients(twin)
    for between in False, True:
        ours = copy.deepcopy(net)
        split(ours, between)
        joint(ours, x)
        assert_same(gradients(ours), wanted)
        often = counted(lambda: joint(ours, x))  # noqa: B023
        for verb in keep, cut, budget, watch, discard, explain:
            for _ in range(2):
                ours.zero_grad()
                found = counted(lambda: verb(ours))  # noqa: B023
                assert verb not in (cut, budget, watch) or found == often, (verb, found, often)
                assert_same(gradients(ours), wanted)
        ours.zero_grad()
        with refused(ours, "the ranks run the forward of the model together"):
            out = gk.infer(ours, x, chunk_size=2)
            sum(losses(out[[0, 3] if dist.get_rank() == 0 else []])).backward()  # type: ignore[union-attr]
        ours.zero_grad()
        joint(ours, x)
        assert_same(gradients(ours), wanted)


# docs -------------------------------------------------------------------------------------------------------------------------


def training_loops_of_the_docs() -> None:
    """Those of docs/distributed.md, each compared with one process that has the batches of all ranks."""
    page = ROOT / "docs" / "distributed.md"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda _backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        for block in blocks(page.read_text()):
            if block.ranks:
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)

    def heads(net: Any, x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
        h = net.trunk(x)
        return cross_entropy(net.label(h), labels) + mse_loss(net.size(h), sizes)

    picked = []

    def rows(net: Any, x: Tensor, labels: Tensor, _sizes: Tensor) -> Tensor:
        y = net(x)
        mask = y.softmax(1).amax(1) < 0.2
        picked.append(int(mask.sum()))
        return cross_entropy(y[mask], labels[mask], reduction="sum") / len(x)

    def every(net: Any, x: Tensor, labels: Tensor, _sizes: Tensor) -> Tensor:
        return cross_entropy(net(x), labels)

    for ours, build, loss in (
        (namespace["two_heads"], namespace["TwoHeads"], heads),
        (namespace["some_rows"], lambda: nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10)), rows),
        (namespace["by_chunks"], lambda: nn.Sequential(nn.Sequential(nn.Linear(20, 64), nn.Tanh()), nn.Linear(64, 10)), every),
    ):
        torch.manual_seed(0)
        net = build()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            for rank in range(dist.get_world_size()):
                (loss(net, *namespace["batch"](step, rank)) / dist.get_world_size()).backward()
            optimizer.step()
        for one, other in zip(ours.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert 0 < sum(picked) < 32 * len(picked)


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program
    for program in (
        keep_and_a_forward_in_between,
        keep_of_frozen_objects,
        keep_and_a_head_used_twice,
        two_cuts,
        cut_and_a_shared_head,
        two_inferences,
        inferences_one_after_the_other,
        infer_around_a_wrapper,
        infer_of_a_compiled_wrapper,
        infer_and_collectives,
        infer_decides_when_rows_are_made,
        cut_in_layouts_of_fsdp,
        tensor_parallel,
        contrastive_over_all_ranks,
        critics_and_a_generator,
        training_loops_of_the_docs,
    )
}

if __name__ == "__main__":
    launched.run(PROGRAMS, sys.argv[1:])
