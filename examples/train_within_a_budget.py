"""Train within a byte budget: the saved tensors of every step stay below 40 % of what they took, and no weight differs.

The training loop is the same function both times. The network has what checkpoints have to be told about: BatchNorm's
running statistics, Dropout's random numbers, and activations in place. On 1,792 handwritten digits of scikit-learn.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import graphkeep as gk

torch.set_num_threads(1)  # the network is tiny
images, labels = load_digits(return_X_y=True)
data, target = torch.tensor(images[:1792]).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels[:1792])


def block(channels, out):
    return Sequential(Conv2d(channels, out, 3, padding=1), BatchNorm2d(out), ReLU(inplace=True), Dropout(0.1))


def train():
    """Plain PyTorch; it knows nothing of a budget."""
    torch.manual_seed(0)
    net = Sequential(block(1, 16), block(16, 16), MaxPool2d(2), block(16, 32), block(32, 32), Flatten(), Linear(512, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _epoch in range(2):
        for rows in torch.randperm(len(target)).split(256):
            loss = cross_entropy(net(data[rows]), target[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"  trained, the last loss is {loss:.3f}")
    return net, torch.rand(1)  # the next random number


print("Plain torch.")
plain, drawn = train()
print("In a budget that it does not reach, to see what it needs.")
with gk.budget("1GiB") as without:
    train()
print(f"  the graph holds {without.peak:,} bytes at most")
print("In a budget of 40 % of it.")
with gk.budget(int(0.4 * without.peak)) as b:
    net, also_drawn = train()
assert b.peak <= b.limit
print(f"  the graph holds at most {b.limit:,} bytes, in each of {b.steps} steps; {b.recomputed_ops:,} ops ran again")
print(b.report())
state, wanted = net.state_dict(), plain.state_dict()
print("weights and running statistics equal, bit for bit:", all(torch.equal(state[name], wanted[name]) for name in wanted))
print("the next random number is the same:", torch.equal(drawn, also_drawn))
try:
    with gk.budget("100KiB"):
        train()
except gk.BudgetError as error:
    print(f"A budget of 100 KiB is refused in the first step, and the error says that it takes {error.smallest:,} bytes.")
    with gk.budget(error.smallest):
        train()
