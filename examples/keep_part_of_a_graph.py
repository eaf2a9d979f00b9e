"""Keep part of a graph: `x` feeds two heads. The backward of the first shall free all above `x` and keep what leads to it.

Plain torch beside `gk.backward(y1, keep=x)`, the spelling `y1.backward(retain_graph=x)`, and `gk.cut(x)`.
"""

import torch

import graphkeep as gk

w = torch.ones(1000, 1000, requires_grad=True)
runs = []  # backwards through the trunk


def trunk():
    w.grad = None
    runs.clear()
    x = (w + 10).sqrt()  # expensive in real life
    x.register_hook(lambda grad: runs.append(1))
    return x


def head1(x):
    x1 = x * x
    return x1 * x1


def head2(x):
    return torch.sqrt(x) / 2


def show(when, y1, x):
    print(f"  {when}, y1's graph saves {gk.explain(y1).saved_bytes} bytes, of which x's {gk.explain(x).saved_bytes}")


def result():
    error = ((w.grad - wanted) / wanted).abs().max()
    print(f"  backwards through the trunk: {len(runs)}; largest relative difference to one joint backward: {error:.0e}")


x = trunk()
(head1(x) + head2(x)).sum().backward()
wanted = w.grad

print("plain torch: retain_graph=True, then y1 = None")
x = trunk()
y1 = head1(x)
log = [y1]  # the name that was forgotten
show("before", y1, x)
y1.sum().backward(retain_graph=True)
y1 = None
show("after the first head", log[0], x)
head2(x).sum().backward()
result()

print("gk.backward(y1.sum(), keep=x)")
x = trunk()
y1 = head1(x)
gk.backward(y1.sum(), keep=x)
show("after the first head", y1, x)
head2(x).sum().backward()
result()

print("gk.install(), then y1.sum().backward(retain_graph=x)")
x = trunk()
y1 = head1(x)
with gk.install():
    y1.sum().backward(retain_graph=x)
show("after the first head", y1, x)
head2(x).sum().backward()
result()

print("gk.cut(x): the trunk's backward runs once, when the block ends")
x = trunk()
with gk.cut(x) as stand_in:
    y1 = head1(stand_in)
    y1.sum().backward()
    print(f"  after the first head, y1's graph saves {gk.explain(y1).saved_bytes} bytes, x's {gk.explain(x).saved_bytes}")
    head2(stand_in).sum().backward()
result()
