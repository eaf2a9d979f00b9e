"""Infer all, then back-propagate batch by batch: outside logic picks each batch after it has seen the outputs.

The network is not trained here; the gradients of the picked inputs are wanted. On 256 handwritten digits of scikit-learn.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import graphkeep as gk

torch.manual_seed(0)
torch.set_num_threads(1)  # the networks are tiny
images, labels = load_digits(return_X_y=True)
inputs, target = torch.tensor(images[:256]).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels[:256])
inputs.requires_grad_()
# the network of PyTorch's CIFAR-10 tutorial, for images of 8x8
convs = [Conv2d(1, 6, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(6, 16, 3, padding=1), ReLU(), MaxPool2d(2), Flatten()]
net = Sequential(*convs, Linear(64, 120), ReLU(), Linear(120, 84), ReLU(), Linear(84, 10)).requires_grad_(False)
rows_run = []  # how many rows each backward through the net ran


def count(_module, _args, out):
    if out.requires_grad:
        out.register_hook(lambda grad: rows_run.append(len(grad)))


net.register_forward_hook(count)


def pick(values):
    """The outside logic: the 128 samples that the network is least sure of, 16 at a time."""
    return values.softmax(1).amax(1).argsort()[:128].split(16)


def one_backward(outputs, batches):
    sum(cross_entropy(outputs[j], target[j], reduction="sum") for j in batches).backward()


def batch_by_batch(outputs, batches, **kwargs):
    for j in batches:
        cross_entropy(outputs[j], target[j], reduction="sum").backward(**kwargs)
        assert inputs.grad[j].any()  # what was wanted; the choice of the next batch may depend on it


def run(forward, way, **kwargs):
    for _ in range(2):  # the first time warms up
        inputs.grad = None
        rows_run.clear()
        start = time.perf_counter()
        outputs = forward(inputs)
        way(outputs, batches, **kwargs)
        seconds = time.perf_counter() - start
    print(f"  {sum(rows_run)} rows run backward; {seconds * 1e3:.0f} ms")
    kept = outputs.plan.kept_bytes if isinstance(outputs, gk.Inference) else gk.explain(outputs).saved_bytes
    print(f"  after the last batch, {kept:,} bytes of graph are kept")
    return inputs.grad


batches = pick(net(inputs).detach())  # the same for every way, so that the gradients can be compared
print("Plain torch, one backward of the summed loss: all batches have to be known before it.")
wanted = run(net, one_backward)
print("Plain torch, one backward for each batch: the first frees the graph of all samples.")
try:
    run(net, batch_by_batch)
except RuntimeError as error:
    print("  the second batch:", str(error).partition(" (")[0])
print("Plain torch, retain_graph=True: each batch pays for all samples, and nothing is freed.")
retained = run(net, batch_by_batch, retain_graph=True)
print("gk.infer: each batch pays for its own rows, runs them forward again and frees them. Any rows, in any order.")
infer = run(lambda x: gk.infer(net, x, chunk_size=64), batch_by_batch)
print("gradients with retain_graph=True equal, bit for bit:", torch.equal(retained, wanted))
print("gradients with gk.infer equal, to rounding:", torch.allclose(infer, wanted, rtol=1e-4, atol=1e-6))
