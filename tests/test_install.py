"""`gk.install()`: ``y.backward(retain_graph=x)``, and everything else as it was."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import graphkeep as gk


def graph() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w = torch.tensor(1.0, requires_grad=True)
    x = w + 10
    x1 = x * x
    return w, x, x1 * x1


@pytest.mark.parametrize("spelled", ["method", "function", "keyword", "edge"])
def test_the_spelled_wish(spelled: str) -> None:
    w, x, y1 = graph()
    with gk.install():
        match spelled:
            case "method":
                y1.backward(retain_graph=x)
            case "function":
                torch.autograd.backward(y1, retain_graph=x)
            case "keyword":
                torch.autograd.backward(tensors=[y1], grad_tensors=[None], retain_graph=[x])
            case _:
                y1.backward(torch.tensor(1.0), torch.autograd.graph.get_gradient_edge(x))
    assert gk.explain(y1).saved_bytes == 0
    (torch.sqrt(x) / 2).backward()
    reference, x, y1 = graph()
    (y1 + torch.sqrt(x) / 2).backward()
    assert torch.equal(w.grad, reference.grad)


@pytest.mark.parametrize("retain", [True, False, None, 1, 0, torch.tensor(True), torch.tensor(False)])
def test_booleans_do_what_they_always_did(retain: object) -> None:
    _, _, y1 = graph()
    with gk.install():
        y1.backward(retain_graph=retain)
        if retain:
            y1.backward()
        else:
            with pytest.raises(RuntimeError, match="second time"):
                y1.backward()


def test_inputs_are_passed_on_and_refused_together_with_a_tensor() -> None:
    w, x, y1 = graph()
    with gk.install():
        y1.backward(inputs=[w], retain_graph=True)
        with pytest.raises(gk.ArgumentError, match="inputs="):
            y1.backward(inputs=[w], retain_graph=x)
    assert w.grad == 4 * 11.0**3


def test_importing_patches_nothing_and_prints_nothing() -> None:
    code = (
        "import torch; before = torch.autograd.backward, torch.Tensor.backward; import graphkeep; "
        "assert before == (torch.autograd.backward, torch.Tensor.backward)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_handles_nest_and_may_be_removed_in_any_order() -> None:
    before = torch.autograd.backward
    first, second = gk.install(), gk.install()
    first.remove()
    first.remove()
    _, x, y1 = graph()
    y1.backward(retain_graph=x)
    second.remove()
    assert torch.autograd.backward is before


def test_a_wrapper_that_somebody_put_around_ours_survives_the_removal() -> None:
    before = torch.autograd.backward
    handle = gk.install()
    ours = torch.autograd.backward
    calls = []

    def theirs(*args: object, **kwargs: object) -> None:
        calls.append(1)
        ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        handle.remove()
        assert torch.autograd.backward is theirs
        graph()[2].backward()
        assert calls == [1]
    finally:
        torch.autograd.backward = before


def test_removed_means_torch_refuses_a_tensor_again() -> None:
    gk.install().remove()
    _, x, y1 = graph()
    with pytest.raises(TypeError):
        y1.backward(retain_graph=x.detach().reshape(1, 1).expand(2, 2))
