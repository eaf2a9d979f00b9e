"""Training programs as users write them: those that leak a graph, those that raise torch's riddles, and those that are well.

Each is a function ``program(w, look)``. Where it has no optimizer it says ``w.step()`` at the end of a step; at its end, while
its locals still live, it calls ``look()``. D1–D26 number the shapes that public bug reports show; each number has several
programs, because its kind is to be handled, not its one line.

Comments in capitals mark the lines that a finding or a note has to name. A module-level script stands in a string, and is run
from a file of its own.
"""
# ruff: noqa: B006, B019 -- what these rules warn of is what the programs are about

from __future__ import annotations

import functools
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 16
Look = Callable[[], None]


class Watch(Protocol):
    """What a program needs of `gk.watch()`."""

    def step(self) -> None: ...


def net(inputs: int = 8, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def batch(n: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8), torch.randint(0, 4, (n,))


# D1: the loss is added up with its graph


def d1_total(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    total = 0.0
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss  # HERE
    look()


def d1_meter(w: Watch, look: Look) -> None:
    class AverageMeter:
        def __init__(self) -> None:
            self.sum: Any = 0
            self.count = 0

        def update(self, val: Tensor, n: int = 1) -> None:
            self.sum = self.sum + val * n  # HERE
            self.count += n

    model = net()
    opt = torch.optim.Adam(model.parameters())
    meter = AverageMeter()
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.update(loss, x.size(0))  # HERE
    look()


def d1_dict(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.RMSprop(model.parameters())
    running = {"loss": torch.zeros(()), "acc": 0.0}
    for _ in range(STEPS):
        x, y = batch()
        out = model(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running["loss"] += loss  # HERE
        running["acc"] += (out.argmax(1) == y).float().mean().item()
    look()


def d1_nonlocal(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    epoch_loss: Any = 0

    def train_step() -> None:
        nonlocal epoch_loss
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch_loss = epoch_loss + loss / len(x)  # HERE

    for _ in range(STEPS):
        train_step()
    look()


def d1_list(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)  # HERE
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss)  # HERE
    look()


D1_SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
running_loss = 0.0
for i in range(16):
    inputs, labels = torch.randn(4, 8), torch.randn(4, 1)
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = criterion(outputs, labels)
    loss.backward()
    optimizer.step()
    running_loss += loss  # HERE
look()
"""


# D2: outputs are kept in an evaluation that builds graphs


def d2_outs(w: Watch, look: Look) -> None:
    model = net().eval()
    outs = []
    for _ in range(STEPS):
        x, _y = batch()
        outs.append(model(x))  # HERE
        w.step()
    look()


def d2_metric(w: Watch, look: Look) -> None:
    class AUROC:
        def __init__(self) -> None:
            self.preds: list[Tensor] = []
            self.target: list[Tensor] = []

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.preds.append(preds)  # HERE
            self.target.append(target)

    model = net().eval()
    metric = AUROC()
    for _ in range(STEPS):
        x, y = batch()
        metric.update(model(x).softmax(-1), y)  # HERE
        w.step()
    look()


def d2_cat(w: Watch, look: Look) -> None:
    model = net().eval()
    all_scores = torch.empty(0, 4)
    for _ in range(STEPS):
        x, _y = batch()
        scores = model(x)  # HERE
        all_scores = torch.cat([all_scores, scores])  # HERE
        w.step()
    look()


def d2_validation(w: Watch, look: Look) -> None:
    class Lit:
        def __init__(self) -> None:
            self.model = net()
            self.opt = torch.optim.Adam(self.model.parameters())
            self.val_outputs: dict[str, list[Tensor]] = defaultdict(list)

        def train_epoch(self) -> None:
            self.model.train()
            for _ in range(2):
                x, y = batch()
                self.opt.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.opt.step()

        def validate(self) -> None:
            self.model.eval()
            for _ in range(3):
                x, _y = batch()
                logits = self.model(x)  # HERE
                self.val_outputs["logits"].append(logits)  # HERE

        def fit(self) -> None:
            for _epoch in range(12):
                self.train_epoch()
                self.validate()
            look()

    Lit().fit()


D2_SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
model.eval()
predictions = {}
for i in range(16):
    images = torch.randn(4, 8)
    logits = model(images)  # HERE
    predictions[i] = logits  # HERE
    w.step()
look()
"""


# D3: what a step returns is kept until the epoch ends


def d3_outputs(w: Watch, look: Look) -> None:
    backbone, head, aux = net(outputs=16), nn.Linear(16, 4), net(16, 2)
    opt = torch.optim.Adam([*backbone.parameters(), *head.parameters()])

    def training_step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = backbone(x)
        loss = F.cross_entropy(head(h), y)
        return {"loss": loss, "aux_logits": aux(h.detach())}  # HERE

    outputs = []
    for _ in range(STEPS):
        out = training_step(*batch())
        opt.zero_grad()
        out["loss"].backward()
        opt.step()
        outputs.append(out)  # HERE
    look()


def d3_trainer(w: Watch, look: Look) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = net()
            self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.step_results: dict[int, dict[str, Any]] = {}

        def training_step(self, index: int) -> Tensor:
            x, y = batch()
            logits = self.model(x)  # HERE
            loss = F.cross_entropy(logits, y)  # HERE
            self.step_results[index] = {"batch": x, "log": {"logits": logits, "loss": loss}}  # HERE
            return loss

        def fit_one_epoch(self) -> None:
            for index in range(STEPS):
                self.opt.zero_grad()
                self.training_step(index).backward()
                self.opt.step()
            look()

    Trainer().fit_one_epoch()


def d3_dataclass(w: Watch, look: Look) -> None:
    @dataclass
    class StepOutput:
        loss: Tensor
        hidden: Tensor

    encoder, decoder = net(outputs=16), nn.Linear(16, 8)
    opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    epoch_end: deque[StepOutput] = deque()
    for _ in range(STEPS):
        x, _y = batch()
        hidden = encoder(x)  # HERE
        loss = F.mse_loss(decoder(hidden), x)  # HERE
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch_end.append(StepOutput(loss, hidden.sigmoid()))  # HERE
    look()


# D4: a moving average of the loss as a tensor


def d4_ema(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    ema = None
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema = loss if ema is None else 0.9 * ema + 0.1 * loss  # HERE
    look()


def d4_attribute(w: Watch, look: Look) -> None:
    class Reinforce:
        def __init__(self) -> None:
            self.policy = net()
            self.opt = torch.optim.SGD(self.policy.parameters(), lr=0.01)
            self.baseline: Any = 0.0

        def update(self) -> None:
            x, _y = batch()
            loss = self.policy(x).logsumexp(-1).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.baseline = 0.95 * self.baseline + 0.05 * loss  # HERE

    agent = Reinforce()
    for _ in range(STEPS):
        agent.update()
    look()


def d4_in_place(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    stats = {"smooth": torch.zeros(()), "best": 1e9}
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        stats["smooth"].mul_(0.9).add_(0.1 * loss)  # HERE
        stats["best"] = min(stats["best"], loss.item())
    look()


# D5: a replay buffer stores values that still have their graph


def d5_deque(w: Watch, look: Look) -> None:
    critic = net(outputs=1)
    buffer: deque[tuple[Tensor, int, Tensor]] = deque(maxlen=1000)
    for t in range(STEPS):
        state = torch.randn(8)
        value = critic(state)  # HERE
        buffer.append((state, t % 4, value))  # HERE
        w.step()
    look()


def d5_ring(w: Watch, look: Look) -> None:
    class ReplayMemory:
        def __init__(self, capacity: int) -> None:
            self.capacity, self.position = capacity, 0
            self.memory: list[Any] = []

        def push(self, **transition: Tensor) -> None:
            if len(self.memory) < self.capacity:
                self.memory.append(None)
            self.memory[self.position] = transition  # HERE
            self.position = (self.position + 1) % self.capacity

    actor = net()
    opt = torch.optim.Adam(actor.parameters())
    replay = ReplayMemory(100)
    for _ in range(STEPS):
        obs = torch.randn(8)
        q = actor(obs)  # HERE
        replay.push(obs=obs, q_taken=q.max())  # HERE
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(actor(x), y).backward()
        opt.step()
    look()


def d5_preallocated(w: Watch, look: Look) -> None:
    class EpisodeBatch:
        def __init__(self, length: int) -> None:
            self.data = {"obs": torch.zeros(length, 8), "values": torch.zeros(length, 1)}

        def update(self, t: int, obs: Tensor, value: Tensor) -> None:
            self.data["obs"][t] = obs
            self.data["values"][t] = value  # HERE

    critic = net(outputs=1)
    episode = EpisodeBatch(64)
    for t in range(STEPS):
        obs = torch.randn(8)
        episode.update(t, obs, critic(obs))  # HERE
        w.step()
    look()


# D6: backward(create_graph=True) leaves cycles through .grad


def d6_inputs(w: Watch, look: Look) -> None:
    critic = net(outputs=1)
    opt = torch.optim.Adam(critic.parameters())
    for _ in range(STEPS):
        real = torch.randn(4, 8, requires_grad=True)
        critic(real).sum().backward(create_graph=True)  # HERE
        penalty = (real.grad.norm(dim=1) - 1).pow(2).mean()
        opt.zero_grad()
        penalty.backward()
        opt.step()
    look()


def d6_fresh_model(w: Watch, look: Look) -> None:
    for _task in range(STEPS):
        learner = net(outputs=1)
        x, _y = batch()
        loss = learner(x).pow(2).mean()
        loss.backward(create_graph=True)  # HERE
        sharpness = sum(p.grad.pow(2).sum() for p in learner.parameters())
        assert sharpness.item() >= 0
        w.step()
    look()


def d6_by_hand(w: Watch, look: Look) -> None:
    model = net(outputs=1)

    def second_order_step(lr: float) -> None:
        x, _y = batch()
        loss = model(x).pow(2).mean()
        torch.autograd.backward(loss, create_graph=True)  # HERE
        for p in model.parameters():
            p.data -= lr * p.grad.data
            p.grad.zero_()

    for _ in range(STEPS):
        second_order_step(0.01)
        w.step()
    look()


# D7: a hook on a graph closes over what owns the graph


def d7_owner(w: Watch, look: Look) -> None:
    class LazyKernel:
        def __init__(self, value: Tensor) -> None:
            self.value = value
            self.grad_norm = 0.0

            def record_norm(grad_inputs: Any, grad_outputs: Any) -> None:
                self.grad_norm = float(grad_outputs[0].norm())

            value.grad_fn.register_hook(record_norm)  # HERE

    model = net()
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x, _y = batch()
        kernel = LazyKernel(model(x))
        opt.zero_grad()
        kernel.value.pow(2).sum().backward()
        opt.step()
    look()


def d7_tensor_hook(w: Watch, look: Look) -> None:
    model = net(outputs=16)
    head = nn.Linear(16, 4)
    opt = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    saliency = []

    def embed(x: Tensor) -> Tensor:
        feat = model(x)

        def grad_cam(grad: Tensor) -> None:
            saliency.append(float((grad * feat).sum()))

        feat.register_hook(grad_cam)  # HERE
        return feat

    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(head(embed(x)), y).backward()
        opt.step()
    look()


def d7_partial(w: Watch, look: Look) -> None:
    def log_grad(record: dict[str, Any], grads: Any) -> None:
        record["norm"] = float(grads[0].norm())

    model = net()
    for step in range(STEPS):
        x, y = batch()
        out = model(x)
        record = {"step": step, "out": out}
        out.grad_fn.register_prehook(functools.partial(log_grad, record))  # HERE
        F.cross_entropy(out, y).backward()
        model.zero_grad()
        w.step()
    look()


# D8: a forward hook appends activations


def d12_kept(w: Watch, look: Look) -> None:
    net = nn.Linear(8, 1)
    losses = []
    for _ in range(STEPS):
        x, _y = batch()
        loss = net(x).exp().mean()
        loss.backward(retain_graph=True)
        losses.append(loss)  # HERE
        w.step()
    look()


def d5_transitions(w: Watch, look: Look) -> None:
    class Replay:
        def __init__(self) -> None:
            self.memory: deque[Any] = deque(maxlen=1_000)

        def push(self, *transition: Any) -> None:
            self.memory.append(transition)  # HERE

    net, replay = nn.Linear(8, 4), Replay()
    for i in range(STEPS):
        x, _y = batch()
        q = net(x).exp()
        replay.push(i, q.max(1).values, x)
        w.step()
    look()


def d8_capture(w: Watch, look: Look) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(8, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).tanh())

    model = Classifier()
    acts = []

    def capture(module: nn.Module, args: Any, output: Tensor) -> None:
        acts.append(output.relu().exp())  # HERE

    model.encoder.register_forward_hook(capture)
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    look()


def d8_per_sample(w: Watch, look: Look) -> None:
    class GradSample:
        def __init__(self, module: nn.Module) -> None:
            self.module = module
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    layer.activations = []
                    layer.register_forward_hook(self.capture_activations)

        def capture_activations(self, layer: Any, args: Any, output: Tensor) -> None:
            layer.activations.append(args[0])  # HERE

    wrapped = GradSample(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    for _ in range(STEPS):
        x, _y = batch()
        logits = wrapped.module(x)  # HERE
        assert logits.shape == (4, 4)
        w.step()
    look()


def d8_default_argument(w: Watch, look: Look) -> None:
    def keep_output(module: nn.Module, args: Any, output: Tensor, store: dict[str, list[Tensor]] = {"out": []}) -> None:
        store["out"].append(output)  # HERE

    model = net()
    model[2].register_forward_hook(keep_output)
    for _ in range(STEPS):
        model(torch.randn(4, 8))  # HERE
        w.step()
    look()
    keep_output.__defaults__[0]["out"].clear()


# D9: a stored exception holds frames


def d9_errors(w: Watch, look: Look) -> None:
    model = net()

    def forward_one(x: Tensor) -> Tensor:
        hidden = model(x).exp()  # HERE
        if len(x) == 4:
            raise ValueError("bad sample")
        return hidden

    errors = []
    for _ in range(STEPS):
        try:
            forward_one(torch.randn(4, 8))
        except ValueError as e:
            errors.append(e)  # KEPT
        w.step()
    look()


def d9_log(w: Watch, look: Look) -> None:
    class Runner:
        def __init__(self) -> None:
            self.model = net()
            self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.failures: dict[int, BaseException] = {}

        def compute(self, step: int) -> Tensor:
            x, y = batch()
            logits = self.model(x)  # HERE
            if step % 2:
                raise ArithmeticError(f"not finite in step {step}")
            return F.cross_entropy(logits, y)

        def run(self) -> None:
            for step in range(24):
                try:
                    loss = self.compute(step)
                    loss.backward()
                except ArithmeticError as error:
                    self.failures[step] = error  # KEPT
                self.opt.step()
                self.opt.zero_grad()
            look()

    Runner().run()


def d9_futures(w: Watch, look: Look) -> None:
    model = net()

    def score(x: Tensor) -> float:
        activation = model(x).tanh()  # HERE
        raise KeyError(len(activation))

    futures = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            future = pool.submit(score, torch.randn(4, 8))
            assert isinstance(future.exception(), KeyError)
            futures.append(future)  # KEPT
            w.step()
        look()


# D10: a cache over a function that returns tensors


def d10_method(w: Watch, look: Look) -> None:
    class RelativeBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 8)
            self.proj = nn.Linear(8, 1)

        @functools.lru_cache(maxsize=None)  # noqa: UP033 -- as the users write it
        def position_bias(self, length: int) -> Tensor:
            return self.proj(self.table(torch.arange(length)).tanh())  # HERE

    rel = RelativeBias()
    for step in range(STEPS):
        bias = rel.position_bias(step + 1)  # HERE
        assert bias.shape == (step + 1, 1)
        w.step()
    look()
    RelativeBias.position_bias.cache_clear()


def d10_function(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    other = net()

    @functools.cache
    def teacher_logits(index: int) -> Tensor:
        torch.manual_seed(index)
        return other(torch.randn(4, 8)).softmax(-1)  # HERE

    for index in range(STEPS):
        target = teacher_logits(index).argmax(-1)  # HERE
        x, _y = batch()
        opt.zero_grad()
        F.cross_entropy(model(x), target).backward()
        opt.step()
    look()


def d10_by_hand(w: Watch, look: Look) -> None:
    def memoize(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        seen: dict[int, Tensor] = {}

        @functools.wraps(function)
        def wrapper(key: int) -> Tensor:
            if key not in seen:
                seen[key] = function(key)  # HERE
            return seen[key]

        return wrapper

    model = net()

    @memoize
    def embed_length(n: int) -> Tensor:
        return model(torch.full((n, 8), float(n)))  # HERE

    for n in range(1, STEPS + 1):
        embed_length(n)  # HERE
        w.step()
    look()


# D11: a suspended generator holds its frame


def d11_streams(w: Watch, look: Look) -> None:
    model = net()

    def rollout(state: Tensor) -> Iterator[int]:
        while True:
            hidden = model(state).exp()  # HERE
            yield int(hidden.argmax())

    streams = []
    for _ in range(STEPS):
        stream = rollout(torch.randn(8))
        next(stream)
        streams.append(stream)  # KEPT
        w.step()
    look()


def d11_trace(w: Watch, look: Look) -> None:
    model = net()

    def tracker() -> Generator[float | None, Tensor, None]:
        trace = []
        answer = None
        while True:
            x = yield answer
            trace.append(model(x))  # HERE
            answer = trace[-1].mean().item()

    scorer = tracker()
    next(scorer)
    for _ in range(STEPS):
        scorer.send(torch.randn(4, 8))
        w.step()
    look()


def d11_async(w: Watch, look: Look) -> None:
    class Env:
        def __init__(self) -> None:
            self.model = net()

        async def episode(self) -> AsyncIterator[float]:
            action_logits = self.model(torch.randn(8))  # HERE
            yield action_logits.max().item()
            yield action_logits.min().item()

    env = Env()
    opt = torch.optim.SGD(env.model.parameters(), lr=0.1)
    pending = {}
    for step in range(STEPS):
        episode = env.episode()
        try:
            episode.__anext__().send(None)
        except StopIteration as first:
            pending[step] = (episode, first.value)  # KEPT
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(env.model(x), y).backward()
        opt.step()
    look()


# D12: retain_graph=True that nobody used


def d12_left_on(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward(retain_graph=True)  # HERE
        opt.step()
    look()


def d12_trainer(w: Watch, look: Look) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = net()
            self.opt = torch.optim.Adam(self.model.parameters())

        def backward(self, loss: Tensor) -> None:
            torch.autograd.backward([loss], retain_graph=True)  # HERE

        def training_step(self) -> Tensor:
            x, y = batch()
            return F.cross_entropy(self.model(x), y)

    trainer = Trainer()
    for _ in range(STEPS):
        trainer.opt.zero_grad()
        trainer.backward(trainer.training_step())
        trainer.opt.step()
    look()


def d12_second_of_two(w: Watch, look: Look) -> None:
    trunk, cls, reg = net(outputs=16), nn.Linear(16, 4), nn.Linear(16, 1)
    opt = torch.optim.Adam([*trunk.parameters(), *cls.parameters(), *reg.parameters()])
    for _ in range(STEPS):
        x, y = batch()
        h = trunk(x)
        opt.zero_grad()
        F.cross_entropy(cls(h), y).backward(retain_graph=True)  # NEEDED
        reg(h).pow(2).mean().backward(retain_graph=True)  # HERE
        opt.step()
    look()


def d12_grad(w: Watch, look: Look) -> None:
    model = net()
    params = list(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, params, retain_graph=True)  # HERE
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p -= 0.01 * g
        w.step()
    look()


# D13: a hook closes over self, and the module is built anew in a loop


def d13_rebuilt(w: Watch, look: Look) -> None:
    class Extractor:
        def __init__(self) -> None:
            self.model = net()
            self.features: dict[str, Tensor] = {}

            def save_features(module: nn.Module, args: Any, output: Tensor) -> None:
                self.features["tanh"] = output  # HERE

            self.model[1].register_forward_hook(save_features)  # HERE

    for _fold in range(STEPS):
        extractor = Extractor()
        x, _y = batch()
        extractor.model(x)  # HERE
        assert extractor.features["tanh"].shape == (4, 16)
        w.step()
    look()


def d13_bound_method(w: Watch, look: Look) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.seen: Any = None
            self.layer.register_forward_hook(self.on_forward)  # HERE

        def on_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.seen = output  # HERE

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)  # HERE

    def trial(lr: float) -> float:
        probe = Probe()
        opt = torch.optim.SGD(probe.parameters(), lr=lr)
        x, y = batch()
        loss = F.cross_entropy(probe(x), y)
        loss.backward()
        opt.step()
        return probe(x).tanh().sum().item()

    for n in range(STEPS):
        trial(0.1 / (n + 1))
    look()


# GK104: a state carried between the steps, with retain_graph=True so that it does not raise


def carried_state(w: Watch, look: Look) -> None:
    inp, decay, readout = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    h = torch.zeros(4, 16)
    for _ in range(STEPS):
        x, y = batch()
        h = torch.tanh(inp(x) + decay(h))  # HERE
        loss = F.cross_entropy(readout(h), y)
        loss.backward(retain_graph=True)  # CALL
        w.step()
    look()


def carried_attribute(w: Watch, look: Look) -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
            self.membrane = torch.zeros(4, 16)

        def forward(self, x: Tensor) -> Tensor:
            self.membrane = torch.tanh(0.9 * self.membrane + self.inp(x))  # HERE
            return self.out(self.membrane)

    snn = Leaky()
    opt = torch.optim.SGD(snn.inp.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(snn(x), y).backward(retain_graph=True)  # CALL
        opt.step()
    look()


# GK107: an attribute of ctx keeps a tensor


def ctx_output(w: Watch, look: Look) -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp()
            ctx.y = y  # HERE
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.y

    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, _y = batch()
        opt.zero_grad()
        Exp.apply(model(x)).mean().backward()
        opt.step()
    look()


def ctx_dict(w: Watch, look: Look) -> None:
    class SquareSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            result = x * x * weight
            ctx.cache = {"x": x, "result": result}  # HERE
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x = ctx.cache["x"]
            return grad * ctx.cache["result"], (grad * x * x).sum(0)

    weight = nn.Parameter(torch.ones(8))
    for _ in range(STEPS):
        out = SquareSum.apply(torch.randn(4, 8), weight)
        out.sum().backward()
        weight.grad = None
        w.step()
    look()


# D14: a hidden state that is not detached


def d14_rnn(w: Watch, look: Look) -> None:
    rnn, readout = nn.RNN(8, 16, batch_first=True), nn.Linear(16, 4)
    h = torch.zeros(1, 4, 16)
    for _ in range(4):
        x, y = torch.randn(4, 5, 8), torch.randint(0, 4, (4,))
        out, h = rnn(x, h)  # BUILT
        loss = F.cross_entropy(readout(out[:, -1]), y)
        loss.backward()  # FREED
        w.step()


def d14_lstm(w: Watch, look: Look) -> None:
    class CharModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)

        def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
            y, state = self.lstm(x, state)  # BUILT
            return self.out(y), state

    model = CharModel()
    hidden = (torch.zeros(1, 4, 16), torch.zeros(1, 4, 16))
    for _ in range(4):
        x = torch.randn(4, 5, 8)
        y, hidden = model(x, hidden)  # BUILT
        F.mse_loss(y, x).backward()  # FREED
        model.zero_grad()
        w.step()


def d14_agent(w: Watch, look: Look) -> None:
    class Agent:
        def __init__(self) -> None:
            self.cell, self.policy = nn.GRUCell(8, 16), nn.Linear(16, 4)
            self.memory = torch.zeros(4, 16)

        def act(self, obs: Tensor) -> Tensor:
            self.memory = self.cell(obs, self.memory)  # BUILT
            return self.policy(self.memory)

        def learn(self) -> None:
            for _ in range(4):
                x, y = batch()
                loss = F.cross_entropy(self.act(x), y)
                loss.backward()  # FREED
                w.step()

    Agent().learn()


def d14_memories(w: Watch, look: Look) -> None:
    layers = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)])
    mems = [torch.zeros(4, 8) for _ in layers]
    for _ in range(4):
        x, _y = batch()
        for i, layer in enumerate(layers):
            x = torch.tanh(layer(torch.cat([x, mems[i]], -1)))  # BUILT
            mems[i] = x
        x.pow(2).mean().backward()  # FREED
        w.step()


# D15: where an optimizer's step lies between, retain_graph=True is no advice


def d15_step_between(w: Watch, look: Look) -> None:
    cell, readout = nn.RNNCell(8, 16), nn.Linear(16, 4)
    opt = torch.optim.Adam([*cell.parameters(), *readout.parameters()])
    h = torch.zeros(4, 16)
    for _ in range(4):
        x, y = batch()
        h = cell(x, h)  # BUILT
        loss = F.cross_entropy(readout(h), y)
        opt.zero_grad()
        loss.backward()  # FREED
        opt.step()  # STEP


def d15_popular_answer(w: Watch, look: Look) -> None:
    model = nn.ModuleDict({"cell": nn.RNNCell(8, 16), "readout": nn.Linear(16, 4)})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    h = torch.zeros(4, 16)
    for _ in range(4):
        x, y = batch()
        h = model["cell"](x, h)  # SAVED
        loss = F.cross_entropy(model["readout"](h), y)
        opt.zero_grad()
        loss.backward(retain_graph=True)
        opt.step()  # CHANGED


def d15_class(w: Watch, look: Look) -> None:
    class Forecaster(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
            self.level: Any = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            self.level = torch.sigmoid(self.mix(self.level + x))  # BUILT
            return self.out(self.level)

    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters())
    series = torch.randn(6, 8)
    for now, after in pairwise(series):
        loss = F.mse_loss(model(now), after)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()  # FREED
        optimizer.step()  # STEP


# D16: a cache in a module, written with grad, read in the next step


def d16_past(w: Watch, look: Look) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
            self.past_keys: Any = None

        def forward(self, x: Tensor) -> Tensor:
            k = self.k(x).tanh()  # BUILT
            self.past_keys = k if self.past_keys is None else torch.cat([self.past_keys, k])  # BUILT
            return (self.q(x) @ self.past_keys.T).softmax(-1) @ self.past_keys

    block = nn.ModuleDict({"attn": Attention(), "out": nn.Linear(8, 8)})
    for _ in range(3):
        x, _y = batch()
        block["out"](block["attn"](x)).pow(2).mean().backward()  # FREED
        block.zero_grad()
        w.step()


def d16_lazy(w: Watch, look: Look) -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt_encoder, self.classifier = net(outputs=8), nn.Linear(8, 4)
            self.ids = torch.randn(1, 8)
            self._prompt: Any = None

        def prompt(self) -> Tensor:
            if self._prompt is None:
                self._prompt = self.prompt_encoder(self.ids)  # BUILT
            return self._prompt

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(x + self.prompt())

    model = Prompted()
    opt = torch.optim.Adam(model.parameters())
    for _ in range(3):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()  # FREED
        opt.step()  # STEP


def d16_buffer(w: Watch, look: Look) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wk = nn.Linear(8, 8)
            self.register_buffer("cache_k", torch.zeros(8, 4, 8), persistent=False)

        def forward(self, x: Tensor, pos: int) -> Tensor:
            self.cache_k[pos] = torch.tanh(self.wk(x))  # BUILT
            return self.cache_k[: pos + 1].sum(0)

    layer = Cached()
    for pos in range(3):
        x, _y = batch()
        loss = layer(x, pos).mean()
        loss.backward()  # FREED
        w.step()


# D17: something computed once before the loop


def d17_features(w: Watch, look: Look) -> None:
    backbone, head = net(outputs=16), nn.Linear(16, 4)
    x, y = batch(16)
    features = backbone(x)  # BUILT
    opt = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(4):
        loss = F.cross_entropy(head(features), y)
        opt.zero_grad()
        loss.backward()  # FREED
        opt.step()


def d17_penalty(w: Watch, look: Look) -> None:
    model = net()
    weight_decay = 1e-3 * sum(p.pow(2).sum() for p in model.parameters())  # BUILT
    for _ in range(4):
        x, y = batch()
        loss = F.cross_entropy(model(x), y) + weight_decay
        loss.backward()  # FREED
        w.step()


def d17_ratio(w: Watch, look: Look) -> None:
    policy = net()
    states, actions = batch(16)
    old_logp = policy(states).log_softmax(-1).gather(1, actions[:, None])  # BUILT
    opt = torch.optim.Adam(policy.parameters())
    for _epoch in range(4):
        logp = policy(states).log_softmax(-1).gather(1, actions[:, None])
        ratio = torch.exp(logp - old_logp)
        loss = -(ratio * torch.randn(16, 1)).mean()
        opt.zero_grad()
        loss.backward()  # FREED
        opt.step()  # STEP


D17_SCRIPT = """\
import torch
from torch import nn

embedding = nn.Embedding(10, 8)
gcn = nn.Linear(8, 8)
classifier = nn.Linear(8, 3)
nodes = torch.arange(10)
node_embeddings = torch.relu(gcn(embedding(nodes)))  # BUILT
labels = torch.randint(0, 3, (10,))
for start in range(0, 10, 5):
    logits = classifier(node_embeddings[start : start + 5])
    loss = nn.functional.cross_entropy(logits, labels[start : start + 5])
    loss.backward()  # FREED
    w.step()
look()
"""


# D18: one loss reaches the other network's graph


def d18_gan(w: Watch, look: Look) -> None:
    G, D = net(outputs=8), net(outputs=1)
    opt_G, opt_D = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    for _ in range(3):
        real, _y = batch()
        fake = G(torch.randn(4, 8))  # BUILT
        d_loss = bce(D(real), ones) + bce(D(fake), zeros)
        opt_D.zero_grad()
        d_loss.backward()  # FREED
        opt_D.step()  # STEP
        g_loss = bce(D(fake), ones)
        opt_G.zero_grad()
        g_loss.backward()
        opt_G.step()


def d18_pix2pix(w: Watch, look: Look) -> None:
    class Pix2Pix:
        def __init__(self) -> None:
            self.netG, self.netD = net(outputs=8), net(16, 1)

        def forward(self) -> None:
            self.real_A = torch.randn(4, 8)
            self.fake_B = self.netG(self.real_A)  # BUILT

        def backward_D(self) -> None:
            pred = self.netD(torch.cat([self.real_A, self.fake_B], 1))
            self.loss_D = F.softplus(pred).mean()
            self.loss_D.backward()  # FREED

        def backward_G(self) -> None:
            pred = self.netD(torch.cat([self.real_A, self.fake_B], 1))
            self.loss_G = F.softplus(-pred).mean()
            self.loss_G.backward()

        def optimize_parameters(self) -> None:
            self.forward()
            self.backward_D()
            self.backward_G()

    model = Pix2Pix()
    for _ in range(3):
        model.optimize_parameters()
        w.step()


def d18_actor_critic(w: Watch, look: Look) -> None:
    actor, critic = net(), net(outputs=1)
    for _ in range(3):
        state, action = batch()
        returns = torch.randn(4, 1)
        value = critic(state)  # BUILT
        advantage = (returns - value).tanh()  # BUILT
        actor_loss = -(actor(state).log_softmax(-1).gather(1, action[:, None]) * advantage).mean()
        actor_loss.backward()  # FREED
        critic_loss = F.mse_loss(value, returns)
        critic_loss.backward()
        w.step()


# D19: a step between two backwards


def d19_gan(w: Watch, look: Look) -> None:
    G, D = net(outputs=8), net(outputs=1)
    opt_G, opt_D = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    for _ in range(3):
        fake = G(torch.randn(4, 8))
        verdict = D(fake)  # SAVED
        d_loss = bce(verdict, zeros)
        g_loss = bce(verdict, ones)
        opt_D.zero_grad()
        d_loss.backward(retain_graph=True)
        opt_D.step()  # CHANGED
        opt_G.zero_grad()
        g_loss.backward()
        opt_G.step()


def d19_shared_trunk(w: Watch, look: Look) -> None:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
            self.pi, self.v = nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.trunk(x)  # SAVED
            return self.pi(h), self.v(h)

    model = ActorCritic()
    actor_opt = torch.optim.RMSprop([*model.trunk.parameters(), *model.pi.parameters()])
    critic_opt = torch.optim.SGD([*model.trunk.parameters(), *model.v.parameters()], lr=0.1)
    for _ in range(3):
        x, y = batch()
        logits, value = model(x)  # SAVED
        actor_loss, critic_loss = F.cross_entropy(logits, y), value.pow(2).mean()
        actor_loss.backward(retain_graph=True)
        actor_opt.step()  # CHANGED
        critic_loss.backward()
        critic_opt.step()


def d19_by_hand(w: Watch, look: Look) -> None:
    model = net()
    x, y = batch()
    out = model(x)  # SAVED
    first, second = F.cross_entropy(out, y), out.pow(2).mean()
    first.backward(retain_graph=True)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad  # CHANGED
    second.backward()


def d19_clamp(w: Watch, look: Look) -> None:
    class WGAN:
        def __init__(self) -> None:
            self.critic = net(outputs=1)
            self.opt = torch.optim.RMSprop(self.critic.parameters())

        def clip_weights(self) -> None:
            for p in self.critic.parameters():
                p.data.clamp_(-0.01, 0.01)
                nn.init.uniform_(p, -0.01, 0.01)  # CHANGED

        def step(self) -> None:
            score = self.critic(torch.randn(4, 8)).mean()  # SAVED
            self.clip_weights()
            score.backward()
            self.opt.step()

    WGAN().step()


# D20: a saved tensor is changed in place


def d20_residual(w: Watch, look: Look) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            r = x
            x = torch.tanh(self.a(x))  # SAVED
            x += r  # CHANGED
            return self.b(x)

    block = Block()
    loss = block(torch.randn(4, 8)).sum()
    loss.backward()


def d20_mask(w: Watch, look: Look) -> None:
    model = net()
    x, _y = batch()
    gate = torch.sigmoid(model(x))  # SAVED
    gate[:, 0] = 0  # CHANGED
    loss = gate.sum()
    loss.backward()


def d20_relu(w: Watch, look: Look) -> None:
    encoder = net()
    activate = nn.ReLU(inplace=True)
    x, _y = batch()
    scale = encoder(x).exp()  # SAVED
    out = activate(scale - 1) + activate(scale)  # CHANGED
    out.mean().backward()


def d20_state(w: Watch, look: Look) -> None:
    class Integrator:
        def __init__(self) -> None:
            self.drive = nn.Linear(8, 8)
            self.potential = torch.zeros(4, 8)

        def advance(self, x: Tensor) -> Tensor:
            self.potential = self.potential + self.drive(x)
            spikes = self.potential * self.potential  # SAVED
            self.potential.mul_(0.5)  # CHANGED
            return spikes

    neuron = Integrator()
    rate = sum(neuron.advance(torch.randn(4, 8)).sum() for _ in range(3))
    rate.backward()


# D21: full backward hooks hold nothing


def d21_full_backward_hooks(w: Watch, look: Look) -> None:
    model = net()
    norms = []
    for layer in model[1:]:
        layer.register_full_backward_hook(lambda module, gi, go: norms.append(go[0].norm().item()))
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    look()


def d21_pre_hooks(w: Watch, look: Look) -> None:
    class Monitor:
        def __init__(self, model: nn.Module) -> None:
            self.seen: dict[str, Tensor] = {}
            for name, module in model.named_modules():
                module.register_full_backward_pre_hook(functools.partial(self.on_backward, name))

        def on_backward(self, name: str, module: nn.Module, grad_output: Any) -> None:
            self.seen[name] = grad_output[0]

    model = nn.Sequential(net(outputs=16), nn.LayerNorm(16), nn.Linear(16, 4))
    monitor = Monitor(model)
    for _ in range(STEPS):
        x, y = batch()
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        model.zero_grad()
        w.step()
    assert monitor.seen
    look()


def d21_removed_hooks(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = []
    for _ in range(STEPS):
        handles = [m.register_full_backward_hook(lambda m, gi, go: shapes.append(go[0].shape)) for m in model[1:]]
        x, y = batch()
        h = model(x)
        h.register_hook(lambda g: g.clamp(-1, 1))
        opt.zero_grad()
        F.cross_entropy(h, y).backward()
        opt.step()
        for handle in handles:
            handle.remove()
    look()


# D22: loop variables keep the last step's graph until they are bound anew


def d22_loop_variables(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        hidden = model[:2](x)
        out = model[2](hidden)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    look()


def d22_attribute(w: Watch, look: Look) -> None:
    class Task:
        def __init__(self) -> None:
            self.model = net()
            self.last: dict[str, Tensor] = {}

        def predict(self, x: Tensor) -> Tensor:
            out = self.model(x)
            self.last["out"] = out
            self.last["prob"] = out.softmax(-1)
            return out

    task = Task()
    for _ in range(STEPS):
        task.predict(torch.randn(4, 8))
        w.step()
    look()


def d22_validation_out(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(8):
        for _ in range(2):
            x, y = batch()
            out = model(x)
            loss = F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        correct = 0
        for _ in range(3):
            x, y = batch()
            out = model(x)
            correct += int((out.argmax(1) == y).sum())
    look()


D22_SCRIPT = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
losses = []
for epoch in range(16):
    prediction = net(torch.randn(4, 8))
    loss = prediction.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if epoch % 4 == 3:
        print(f"{epoch}: {sum(losses) / len(losses):.3f}")
look()
"""


# D23: memory that grows and is no graph


def d23_pool(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    pool = []
    for step in range(STEPS):
        pool.append(torch.empty(1024 * (step + 1)))
        x, y = batch()
        torch.stack([x, x], out=pool[-1][: 2 * x.numel()].view(2, *x.shape))
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    look()


def d23_dataset(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    cached: dict[int, tuple[Tensor, Tensor]] = {}
    arrays = []
    for step in range(STEPS):
        cached[step] = batch(32)
        x, y = cached[step]
        arrays.append(x.numpy().copy())
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    look()


def d23_longer_batches(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scratch: Any = None
    for step in range(STEPS):
        x, y = batch(4 * (step + 1))
        if scratch is None or scratch.numel() < x.numel():
            scratch = torch.empty(2 * x.numel())
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    look()


# D24: gradient accumulation


def d24_accumulation(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    for micro in range(48):
        x, y = batch()
        (F.cross_entropy(model(x), y) / 4).backward()
        if (micro + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
    look()


def d24_sum_then_backward(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        losses = []
        for _micro in range(3):
            x, y = batch()
            losses.append(F.cross_entropy(model(x), y))
        opt.zero_grad()
        torch.stack(losses).mean().backward()
        opt.step()
    look()


def d24_pending(w: Watch, look: Look) -> None:
    class Accumulator:
        def __init__(self) -> None:
            self.model = net()
            self.opt = torch.optim.Adam(self.model.parameters())
            self.pending: list[Tensor] = []

        def feed(self) -> None:
            x, y = batch()
            self.pending.append(F.cross_entropy(self.model(x), y))
            if len(self.pending) == 4:
                self.opt.zero_grad()
                sum(self.pending).backward()
                self.opt.step()
                self.pending.clear()

    accumulator = Accumulator()
    for _ in range(50):
        accumulator.feed()
    look()


# D25: the first steps grow


def d25_optimizer_state(w: Watch, look: Look) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))
    x, y = batch()
    model(x)
    opt = torch.optim.Adam(model.parameters(), amsgrad=True)
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    look()


def d25_window_fills(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    recent: deque[Tensor] = deque(maxlen=4)
    for _ in range(24):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        recent.append(loss)
    look()


def d25_position_cache(w: Watch, look: Look) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 4)
            self.tables: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            n = len(x)
            if n not in self.tables:
                self.tables[n] = torch.outer(torch.arange(n).float(), torch.ones(8)).sin()
            return self.proj(x + self.tables[n])

    model = Rotary()
    opt = torch.optim.Adam(model.parameters())
    for step in range(24):
        x, y = batch(2 + step % 5)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    look()


def d25_lbfgs(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)
    x, y = batch(16)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        opt.step(closure)
    look()


# D26: truncated backpropagation through time keeps a window on purpose


def d26_window(w: Watch, look: Look) -> None:
    cell, readout = nn.RNNCell(8, 16), nn.Linear(16, 4)
    opt = torch.optim.Adam([*cell.parameters(), *readout.parameters()])
    h = torch.zeros(4, 16)
    loss = torch.zeros(())
    for t in range(48):
        x, y = batch()
        h = cell(x, h)
        loss = loss + F.cross_entropy(readout(h), y)
        if (t + 1) % 4 == 0:
            opt.zero_grad()
            loss.backward()
            opt.step()
            h, loss = h.detach(), torch.zeros(())
    look()


def d26_step_by_step(w: Watch, look: Look) -> None:
    lstm, readout = nn.LSTMCell(8, 16), nn.Linear(16, 4)
    state = (torch.zeros(4, 16), torch.zeros(4, 16))
    losses = []
    for t in range(48):
        x, y = batch()
        state = lstm(x, state)
        losses.append(F.cross_entropy(readout(state[0]), y))
        if t % 6 == 5:
            torch.stack(losses).sum().backward()
            losses = []
            state = tuple(s.detach() for s in state)
        w.step()
    look()


def d26_sliding(w: Watch, look: Look) -> None:
    class TBPTT:
        def __init__(self, k: int) -> None:
            self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 4)
            self.opt = torch.optim.SGD([*self.cell.parameters(), *self.out.parameters()], lr=0.1)
            self.states: deque[tuple[Tensor, Tensor]] = deque([(torch.zeros(4, 16), torch.zeros(4, 16))], maxlen=k)

        def step(self) -> None:
            x, y = batch()
            inner = self.states[-1][1].detach().requires_grad_()
            outer = self.cell(x, inner)
            self.states.append((inner, outer))
            self.opt.zero_grad()
            F.cross_entropy(self.out(outer), y).backward()
            self.opt.step()

    trainer = TBPTT(4)
    for _ in range(24):
        trainer.step()
    look()


# Ordinary loops that are well


def ok_classification(w: Watch, look: Look) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4))
    opt = torch.optim.Adam(model.parameters())
    history = []
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        history.append(loss.item())
    look()


def ok_gan(w: Watch, look: Look) -> None:
    G, D = net(outputs=8), net(outputs=1)
    opt_G, opt_D = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    for _ in range(STEPS):
        real, _y = batch()
        fake = G(torch.randn(4, 8))
        opt_D.zero_grad()
        d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
        d_loss.backward()
        opt_D.step()
        opt_G.zero_grad()
        g_loss = bce(D(fake), ones)
        g_loss.backward()
        opt_G.step()
    look()


def ok_gan_joint(w: Watch, look: Look) -> None:
    G, D = net(outputs=8), net(outputs=1)
    opt = torch.optim.Adam([*G.parameters(), *D.parameters()])
    for _ in range(STEPS):
        fake = G(torch.randn(4, 8))
        score = D(fake).mean()
        opt.zero_grad()
        score.backward(retain_graph=True)
        (fake.pow(2).mean() - score).backward()
        opt.step()
    look()


def ok_rnn(w: Watch, look: Look) -> None:
    lstm, readout = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)
    opt = torch.optim.SGD([*lstm.parameters(), *readout.parameters()], lr=0.1)
    hidden: Any = None
    for _ in range(STEPS):
        x = torch.randn(4, 5, 8)
        out, hidden = lstm(x, hidden)
        hidden = tuple(s.detach() for s in hidden)
        opt.zero_grad()
        F.mse_loss(readout(out), x).backward()
        opt.step()
    look()


def ok_evaluation(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    predictions, probabilities = [], []
    for _epoch in range(8):
        for _ in range(2):
            x, y = batch()
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            predictions.extend(model(batch()[0]) for _ in range(3))
        probabilities.append(model(batch()[0]).softmax(-1).detach())
        model.train()
    look()


def ok_weight_average(w: Watch, look: Look) -> None:
    model, average = net(), net().requires_grad_(False)
    swa = torch.optim.swa_utils.AveragedModel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        target = average(x).softmax(-1)
        opt.zero_grad()
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x), target)).backward()
        opt.step()
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.mul_(0.99).add_(q, alpha=0.01)
        swa.update_parameters(model)
    look()


def ok_autocast(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    look()


def ok_checkpoint(w: Watch, look: Look) -> None:
    blocks = nn.ModuleList([net(outputs=8) for _ in range(3)])
    opt = torch.optim.Adam(blocks.parameters())
    for step in range(STEPS):
        x, _y = batch()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=step % 2 == 0 and x.requires_grad)
        opt.zero_grad()
        x.pow(2).mean().backward()
        opt.step()
    look()


def ok_multi_task(w: Watch, look: Look) -> None:
    class MultiTask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = net(outputs=16)
            self.heads = nn.ModuleDict({"cls": nn.Linear(16, 4), "reg": nn.Linear(16, 1)})
            self.log_vars = nn.Parameter(torch.zeros(2))

        def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            h = self.trunk(x)
            return {"cls": F.cross_entropy(self.heads["cls"](h), y), "reg": self.heads["reg"](h).pow(2).mean()}

    model = MultiTask()
    opt = torch.optim.AdamW(model.parameters())
    totals: dict[str, float] = defaultdict(float)
    for _ in range(STEPS):
        losses = model.losses(*batch())
        total = sum(torch.exp(-s) * loss + s for s, loss in zip(model.log_vars, losses.values(), strict=True))
        opt.zero_grad()
        total.backward()
        opt.step()
        for name, loss in losses.items():
            totals[name] += loss.item()
    look()


def ok_scheduler(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=STEPS)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        scheduler.step()
        plateau.step(loss.detach())
    look()


def ok_early_stopping(w: Watch, look: Look) -> None:
    class EarlyStopping:
        def __init__(self) -> None:
            self.best, self.bad_epochs = float("inf"), 0
            self.state: dict[str, Tensor] = {}

        def __call__(self, loss: float, model: nn.Module) -> bool:
            if loss < self.best:
                self.best, self.bad_epochs = loss, 0
                self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            else:
                self.bad_epochs += 1
            return self.bad_epochs > 20

    model = net()
    opt = torch.optim.Adam(model.parameters())
    stop = EarlyStopping()
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if stop(loss.item(), model):
            break
    look()


def ok_best_loss_tensor(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    best = torch.tensor(float("inf"))
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if loss.item() < best.item():
            best = loss
    look()


def ok_gradient_penalty(w: Watch, look: Look) -> None:
    G, D = net(outputs=8), net(outputs=1)
    opt_G, opt_D = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
    for _ in range(STEPS):
        real, _y = batch()
        fake = G(torch.randn(4, 8)).detach()
        mixed = torch.lerp(real, fake, torch.rand(4, 1)).requires_grad_()
        (grad,) = torch.autograd.grad(D(mixed).sum(), mixed, create_graph=True)
        loss = D(fake).mean() - D(real).mean() + 10 * (grad.norm(dim=1) - 1).pow(2).mean()
        opt_D.zero_grad()
        loss.backward()
        opt_D.step()
        opt_G.zero_grad()
        (-D(G(torch.randn(4, 8))).mean()).backward()
        opt_G.step()
    look()


def ok_create_graph_broken(w: Watch, look: Look) -> None:
    model = net(outputs=1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, _y = batch()
        grads = torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()), create_graph=True)
        sharpness = sum(g.pow(2).sum() for g in grads)
        opt.zero_grad()
        sharpness.backward()
        opt.step()
    look()


def ok_maml(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        opt.zero_grad()
        for _task in range(2):
            params = dict(model.named_parameters())
            for _inner in range(2):
                x, y = batch()
                loss = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                params = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
            x, y = batch()
            F.cross_entropy(torch.func.functional_call(model, params, (x,)), y).backward()
        opt.step()
    look()


def ok_replay_buffer(w: Watch, look: Look) -> None:
    q_net, target = net(), net()
    target.load_state_dict(q_net.state_dict())
    opt = torch.optim.Adam(q_net.parameters())
    buffer: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=500)
    for step in range(STEPS):
        state = torch.randn(8)
        buffer.append((state, q_net(state).detach(), float(step % 3)))
        states = torch.stack([s for s, _q, _r in buffer])
        rewards = torch.tensor([r for _s, _q, r in buffer])
        goal = rewards + 0.9 * target(states).max(1).values.detach()
        opt.zero_grad()
        F.smooth_l1_loss(q_net(states).max(1).values, goal).backward()
        opt.step()
    look()


def ok_metrics(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    history: dict[str, list[float]] = {"loss": [], "acc": [], "norm": []}
    log = logging.getLogger("tests.leaks")
    for step in range(STEPS):
        x, y = batch()
        out = model(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        history["loss"].append(loss.item())
        history["acc"].append((out.argmax(1) == y).float().mean().item())
        history["norm"].append(sum(p.grad.norm().item() for p in model.parameters()))
        log.debug("step %d: %s", step, loss)
    look()


def ok_continue(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    skipped = 0
    for step in range(24):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        if step % 3 == 2:
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
    look()


def ok_trainer(w: Watch, look: Look) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = net()
            self.opt = torch.optim.Adam(self.model.parameters())
            self.state: dict[str, Any] = {"epoch": 0}

        def step(self) -> None:
            x, y = batch()
            self.output = self.model(x)
            self.loss = F.cross_entropy(self.output, y)
            self.state["last_loss"] = self.loss
            self.opt.zero_grad()
            self.loss.backward()
            self.opt.step()

        def fit(self) -> None:
            for epoch in range(4):
                self.state["epoch"] = epoch
                for _ in range(4):
                    self.step()
            look()

    Trainer().fit()


def ok_reinforce(w: Watch, look: Look) -> None:
    @dataclass
    class Policy:
        net: nn.Module
        log_probs: list[Tensor] = field(default_factory=list)
        rewards: list[float] = field(default_factory=list)

    policy = Policy(net())
    opt = torch.optim.Adam(policy.net.parameters())
    for episode in range(STEPS):
        for _t in range(3 + episode % 3):
            dist = torch.distributions.Categorical(logits=policy.net(torch.randn(8)))
            action = dist.sample()
            policy.log_probs.append(dist.log_prob(action))
            policy.rewards.append(float(action))
        opt.zero_grad()
        torch.stack([-p * r for p, r in zip(policy.log_probs, policy.rewards, strict=True)]).sum().backward()
        opt.step()
        policy.log_probs.clear()
        policy.rewards.clear()
    look()


def ok_activations(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())
    acts: dict[str, Tensor] = {}
    means: list[Tensor] = []
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda m, args, out, name=name: acts.__setitem__(name, out))
    model[1].register_forward_hook(lambda m, args, out: means.append(out.detach().mean()))
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        (F.cross_entropy(model(x), y) + 0.01 * acts["1"].abs().mean()).backward()
        opt.step()
    look()


def ok_exceptions(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = []
    for step in range(STEPS):
        try:
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            if step % 4 == 1:
                raise FloatingPointError(f"step {step}")
            opt.zero_grad()
            loss.backward()
        except FloatingPointError as error:
            messages.append(str(error))
        opt.step()
    look()


def ok_custom_function(w: Watch, look: Look) -> None:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, beta: float) -> Tensor:
            y = x * torch.sigmoid(beta * x)
            ctx.save_for_backward(x, y)
            ctx.beta, ctx.shape = beta, x.shape
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            x, y = ctx.saved_tensors
            s = torch.sigmoid(ctx.beta * x)
            return grad * (s + ctx.beta * y * (1 - s)), None

    model = net()
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        F.cross_entropy(Swish.apply(model(x), 1.5), y).backward()
        opt.step()
    look()


def ok_generator(w: Watch, look: Look) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters())

    def losses() -> Iterator[Tensor]:
        for _ in range(STEPS):
            x, y = batch()
            yield F.cross_entropy(model(x), y)

    for loss in losses():
        opt.zero_grad()
        loss.backward()
        opt.step()
    look()


def ok_memory_bank(w: Watch, look: Look) -> None:
    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = net(outputs=8), net(outputs=8)
            self.register_buffer("queue", torch.randn(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            q = F.normalize(self.q(x), dim=1)
            with torch.no_grad():
                k = F.normalize(self.k(x), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1)
            self.queue = torch.cat([k, self.queue])[:32]
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    model = MoCo()
    opt = torch.optim.SGD(model.q.parameters(), lr=0.1)
    for _ in range(STEPS):
        opt.zero_grad()
        model(torch.randn(4, 8)).backward()
        opt.step()
    look()


def ok_hessian_vector(w: Watch, look: Look) -> None:
    model = net(outputs=1)
    params = list(model.parameters())
    products = []
    for _ in range(STEPS):
        x, _y = batch()
        grads = torch.autograd.grad(model(x).pow(2).mean(), params, create_graph=True)
        vector = [torch.randn_like(p) for p in params]
        dot = sum((g * v).sum() for g, v in zip(grads, vector, strict=True))
        products.append(float(torch.autograd.grad(dot, params[0])[0].norm()))
        w.step()
    look()


D24_SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
accumulate, seen = 4, 0.0
for step in range(48):
    loss = model(torch.randn(4, 8)).pow(2).mean() / accumulate
    loss.backward()
    seen += loss.item()
    if (step + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
look()
"""


D26_SCRIPT = """\
import torch
from torch import nn

rnn = nn.GRU(8, 16)
out = nn.Linear(16, 8)
optimizer = torch.optim.Adam([*rnn.parameters(), *out.parameters()])
hidden = None
series = torch.randn(64, 1, 8)
for start in range(0, 60, 4):
    if hidden is not None:
        hidden = hidden.detach()
    prediction, hidden = rnn(series[start : start + 4], hidden)
    loss = nn.functional.mse_loss(out(prediction), series[start + 1 : start + 5])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
look()
"""


D20_SCRIPT = """\
import torch
from torch import nn

layer = nn.Linear(8, 8)
x = torch.randn(4, 8)
h = layer(x).exp()  # SAVED
for r in torch.randn(3, 4, 8):
    h += r  # CHANGED
h.mean().backward()
"""


D11_SCRIPT = """\
import torch
from torch import nn

policy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

def sample_actions(n):
    for _ in range(n):
        scores = policy(torch.randn(4, 8)).softmax(-1)  # HERE
        yield int(scores[0].argmax())

workers = {}
for step in range(16):
    workers[step] = sample_actions(3)
    next(workers[step])
    w.step()
look()
"""
