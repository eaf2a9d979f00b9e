"""Infer all, then back-propagate batch by batch: outside logic picks the batches after it has seen all outputs.

The network is not trained here; the gradients of the picked inputs are wanted. Plain torch beside what graphkeep can do
today, on 256 handwritten digits of scikit-learn. Rows of one batched forward cannot be freed one by one yet: that is planned.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import graphkeep as gk

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs = (torch.tensor(images[:256], dtype=torch.float32).view(-1, 1, 8, 8) / 16).requires_grad_()
target = torch.tensor(labels[:256])
# the network of PyTorch's CIFAR-10 tutorial, for images of 8x8
convs = [Conv2d(1, 6, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(6, 16, 3, padding=1), ReLU(), MaxPool2d(2), Flatten()]
net = Sequential(*convs, Linear(64, 120), ReLU(), Linear(120, 84), ReLU(), Linear(84, 10)).requires_grad_(False)
rows_run = []  # how many rows each backward through the net ran


def count(_module, _args, out):
    out.register_hook(lambda grad: rows_run.append(len(grad)))


net.register_forward_hook(count)


def pick(outputs):
    """The outside logic: the 128 samples that the network is least sure of, 32 at a time."""
    return outputs.detach().softmax(1).amax(1).argsort()[:128].split(32)


def loss(rows, j):
    return cross_entropy(rows, target[j], reduction="sum")


def show(when, outputs):
    print(f"  {when}: {sum(rows_run)} rows run backward, {gk.explain(outputs).saved_bytes:,} bytes still saved")


print("Plain torch, one backward of the summed loss: every batch has to be known before it.")
outputs = net(inputs)
batches = pick(outputs)  # the same for every way below, so that the gradients can be compared
show("before", outputs)
sum(loss(outputs[j], j) for j in batches).backward()
show("after", outputs)
wanted, inputs.grad = inputs.grad, None

print("Plain torch, one backward for each batch.")
outputs = net(inputs)
try:
    for j in batches:
        loss(outputs[j], j).backward()
except RuntimeError as error:
    print("  the second batch:", str(error).partition(" (")[0])

print("Plain torch, retain_graph=True: each batch pays for all rows, and nothing is freed.")
rows_run.clear()
inputs.grad, outputs = None, net(inputs)
for j in batches:
    loss(outputs[j], j).backward(retain_graph=True)
show("after", outputs)
print("  gradients equal, bit for bit:", torch.equal(inputs.grad, wanted))

print("gk.cut(outputs): the net runs backward once. The inputs have their gradients at the end, not between batches.")
rows_run.clear()
inputs.grad, outputs = None, net(inputs)
with gk.cut(outputs) as out:
    for j in batches:
        loss(out[j], j).backward()
    show("in the block", outputs)
show("after it", outputs)
print("  gradients equal, bit for bit:", torch.equal(inputs.grad, wanted))

print("One graph per sample: each batch pays for its own rows and frees them. Their gradients are there at once.")
rows_run.clear()
samples = [sample.requires_grad_() for sample in inputs.detach().split(1)]
outputs = [net(sample) for sample in samples]
for j in batches:
    loss(torch.cat([outputs[i] for i in j]), j).backward()
show("after", outputs)
gk.discard(outputs)  # those that were never picked
show("after gk.discard(outputs)", outputs)
grads = torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in samples])
print("  gradients equal, to rounding (the kernels run on other shapes):", torch.allclose(grads, wanted, atol=1e-6))
