"""Forward all, backward some: each sample runs forward on its own, and only those that meet a condition join the loss.

When is the graph of a rejected sample freed? Plain torch beside `gk.discard`, on 200 handwritten digits of scikit-learn.
"""

import weakref

import torch
from sklearn.datasets import load_digits
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import graphkeep as gk

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = torch.tensor(images[:200], dtype=torch.float32).view(-1, 1, 8, 8) / 16
target = torch.tensor(labels[:200])
# the network of PyTorch's CIFAR-10 tutorial, for images of 8x8, a little trained
convs = [Conv2d(1, 6, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(6, 16, 3, padding=1), ReLU(), MaxPool2d(2), Flatten()]
model = Sequential(*convs, Linear(64, 120), ReLU(), Linear(120, 84), ReLU(), Linear(84, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(25):
    optimizer.zero_grad()
    cross_entropy(model(data), target).backward()
    optimizer.step()

graphs = []  # a weak reference into each graph: to what its first Linear saved
model[7].register_forward_pre_hook(lambda _, args: graphs.append(weakref.ref(args[0].untyped_storage())))


def one_batch(*, discard):
    """The askers' loop over one batch, with or without `gk.discard` on what is rejected."""
    model.zero_grad()
    graphs.clear()
    total, n, rejected, most = 0.0, 0, 0, 0

    def forward_ended(*_):  # `out` still names the output of the sample before
        nonlocal most
        most = max(most, sum(graph() is not None for graph in graphs) - n)

    hook = model.register_forward_hook(forward_ended)
    for i in range(len(target)):
        out = model(data[i : i + 1])
        if out.max() > 10:  # a condition on the output: the model is sure of this sample
            rejected += 1
            if discard:
                gk.discard(out)  # freed here, although `out` still names its output
            continue
        total, n = total + cross_entropy(out, target[i : i + 1]), n + 1
        if n == 32:
            mean = total / n
            mean.backward()
            total, n = 0.0, 0
    if n:  # here and not in the loop (`or i == len(target) - 1`), where a rejected last sample would skip it
        mean = total / n
        mean.backward()
    hook.remove()
    print(f"  {rejected} of {len(target)} samples rejected")
    print(f"  graphs alive at the end of a forward, besides those that wait in the sum: at most {most}")
    print(f"  the sum's graph after its backward: {gk.explain(mean).saved_bytes} bytes, although a name still points at it")
    return [p.grad.clone() for p in model.parameters()]


if __name__ == "__main__":
    print(f"one sample's graph saves {gk.explain(model(data[:1].clone())).saved_bytes} bytes")
    print("plain torch: a rejected graph lives until `out` is bound anew, after the next forward")
    plain = one_batch(discard=False)
    print("gk.discard(out): a rejected graph is freed at once")
    ours = one_batch(discard=True)
    print(f"gradients equal, bit for bit: {all(map(torch.equal, plain, ours))}")
