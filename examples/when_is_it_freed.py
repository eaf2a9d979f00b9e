"""Forward all, backward some: when is each sample's graph freed, and by what?

The program as it was asked about, in plain torch, seen by `gk.watch` and `gk.explain`; with 12 samples, and a backward
for every
three that contribute.
"""

from linecache import getline

import torch

import graphkeep as gk

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
criterion = torch.nn.CrossEntropyLoss()
data, target = torch.randn(12, 20), torch.randint(10, (12,))


def condition(out):
    return out.detach().max() > 0.3


def say_what_was_freed():
    for life in list(w.lives)[len(told) :]:
        by = "reference count" if life.backward is None else "the backward"
        line = getline(life.died.file, life.died.line).strip()
        print(f"  freed {life.tensors} saved tensors, {life.bytes} bytes, by {by} at `{line}`")
        told.append(life)


told = []
with gk.watch() as w:
    total, n = 0.0, 0
    for i in range(len(target)):
        print(f"sample {i} runs forward")
        out = model(data[i : i + 1])
        say_what_was_freed()
        if not condition(out):
            print(f"  sample {i} is rejected; its graph lives on, for `out` still points at it")
            continue
        total, n = total + criterion(out, target[i : i + 1]), n + 1
        if n == 3 or i == len(target) - 1:
            print("When will the graphs of those that contribute be freed?", gk.explain(total), sep="\n")
            (total / n).backward()
            say_what_was_freed()
            print(f"  the graph of the sum is {gk.explain(total).state} now; its nodes go when `total` and `out` are bound")
            total, n = 0.0, 0
print(w.summary())
