"""Forward all, backward some: each sample runs forward, and only those whose output meets a condition join the loss.

When is the graph of a rejected sample freed, and when are those of the others? On 256 handwritten digits of scikit-learn.
"""

import time
import weakref

import torch
from sklearn.datasets import load_digits
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import graphkeep as gk

torch.manual_seed(0)
torch.set_num_threads(1)  # the networks are tiny
images, labels = load_digits(return_X_y=True)
data, target = torch.tensor(images[:256]).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels[:256])
# the network of PyTorch's CIFAR-10 tutorial, for images of 8x8, a little trained
convs = [Conv2d(1, 6, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(6, 16, 3, padding=1), ReLU(), MaxPool2d(2), Flatten()]
model = Sequential(*convs, Linear(64, 120), ReLU(), Linear(120, 84), ReLU(), Linear(84, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(25):
    model.zero_grad()
    cross_entropy(model(data), target).backward()
    optimizer.step()


def condition(out):
    return out.amax(-1) < 10  # the model is not sure of this sample


def one_by_one(reject):  # the program as asked, but for its last backward: in the loop, a rejected last sample skips it
    total, n = 0.0, 0
    for i in range(len(target)):
        out = model(data[i : i + 1])
        if not condition(out):
            reject(out)
            continue
        total, n = total + cross_entropy(out, target[i : i + 1]), n + 1
        if n == 32:
            (total / n).backward()
            total, n = 0.0, 0
    (total / n).backward() if n else None


def by_rows():
    with gk.infer(model, data, chunk_size=16) as out:
        for rows in condition(out.values).nonzero()[:, 0].split(32):
            cross_entropy(out[rows], target[rows]).backward()
    return out.plan


graphs = []  # of each graph: its number of samples, and a weak reference to what its first Linear saved
model[7].register_forward_pre_hook(lambda _, args: graphs.append((len(args[0]), weakref.ref(args[0].untyped_storage()))))
alive = []  # at the end of each forward: how many samples have a graph
model.register_forward_hook(lambda *_: alive.append(sum(samples for samples, saved in graphs if saved() is not None)))


def run(way, *args):
    for _ in range(2):  # the first time warms up
        model.zero_grad()
        alive.clear()
        start = time.perf_counter()
        plan = way(*args)
        seconds = time.perf_counter() - start
    print(f"  at most {max(alive)} samples had a graph at once; {seconds * 1e3:.0f} ms")
    if plan:
        print(f"  {plan.samples} samples run forward, {plan.rows_asked} asked for, {plan.rows_backward} run backward")
    return [p.grad.clone() for p in model.parameters()]


print("Plain torch. A rejected sample's graph lives until `out` is bound anew, which is after the next forward;")
print("the graphs of those that joined the sum live until its backward, which frees them at once.")
plain = run(one_by_one, lambda out: None)
print("gk.discard(out), still one sample at a time: a rejected graph is freed at once.")
discarded = run(one_by_one, gk.discard)
print("gk.infer, by chunks of 16: the forward lets its graphs go, and each backward makes those of its own rows again.")
infer = run(by_rows)
print("gradients with gk.discard equal, bit for bit:", all(map(torch.equal, plain, discarded)))
close = [torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, infer, strict=True)]
print("gradients with gk.infer equal, to rounding (its kernels run on batches):", all(close))
