"""What `gk.budget` refuses, and what it says then: what, where, and what to write instead."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget_kinds import BYTES, deep, loss_of, weight

import graphkeep as gk

VALUES: dict[str, Any] = {
    "zero": 0,
    "negative": -1,
    "zero as text": "0",
    "zero with a unit": "0 GiB",
    "negative as text": "-5MiB",
    "nan": math.nan,
    "infinity": math.inf,
    "a fraction of zero": 0.0,
    "a negative fraction": -0.5,
    "a fraction above one": 1.5,
    "bytes as a float": 2.0**30,
    "no text": "",
    "blank": "  ",
    "no number": "lots",
    "an unknown unit": "5 parsecs",
    "a fraction as text": "50%",
    "two numbers": "1 2 MiB",
    "a comma": "1,5GiB",
    "nan as text": "nan",
    "infinity as text": "inf",
    "less than a byte": "0.1B",
}
TYPES: dict[str, Any] = {
    "true": True,
    "false": False,
    "a tensor": torch.ones(()),
    "a tensor of two integers": torch.tensor([2**30, 2**30]),
    "a list": [2**30],
    "bytes": b"2GiB",
    "a complex number": 1j,
    "a device": torch.device("cpu"),
    "a module": torch.nn.Linear(1, 1),
    "a type": int,
}


def check(error: gk.GraphkeepError) -> None:
    assert error.what
    assert error.instead
    assert str(error).startswith(error.what)
    assert f"write instead: {error.instead}" in str(error)


@pytest.mark.parametrize("limit", VALUES.values(), ids=VALUES)
def test_a_limit_of_a_wrong_value(limit: Any) -> None:
    with pytest.raises(gk.ArgumentError) as caught:
        gk.budget(limit)
    check(caught.value)
    assert repr(limit) in caught.value.what


@pytest.mark.parametrize("limit", TYPES.values(), ids=TYPES)
def test_a_limit_of_a_wrong_type(limit: Any) -> None:
    with pytest.raises(gk.ArgumentTypeError) as caught:
        gk.budget(limit)
    check(caught.value)
    assert type(limit).__name__ in caught.value.what


@pytest.mark.parametrize("limits", [(), (None,)], ids=["nothing", "none"])
def test_no_limit(limits: Any) -> None:
    with pytest.raises(gk.ArgumentError) as caught:
        gk.budget(*limits)
    check(caught.value)


@pytest.mark.parametrize("limit", [1, "1", "1B", 2**62, "4096TiB", 1.0, 5e-324], ids=str)
def test_the_ends_of_what_is_allowed(limit: Any) -> None:
    with gk.budget(limit):
        pass


@pytest.mark.parametrize("options", [{"on_exit": "keep"}, {"on_exit": "Recompute"}], ids=str)
def test_an_option_of_a_wrong_value(options: dict[str, Any]) -> None:
    with pytest.raises(gk.ArgumentError) as caught:
        gk.budget("1GiB", **options)
    check(caught.value)
    assert "recompute" in str(caught.value)
    assert repr(next(iter(options.values()))) in str(caught.value)


@pytest.mark.parametrize("options", [{"on_exit": None}, {"on_exit": 1}], ids=str)
def test_an_option_of_a_wrong_type(options: dict[str, Any]) -> None:
    with pytest.raises((gk.ArgumentError, gk.ArgumentTypeError)) as caught:
        gk.budget("1GiB", **options)
    check(caught.value)
    assert "recompute" in str(caught.value)


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        gk.budget("1GiB", "recompute")  # type: ignore[misc]
    with pytest.raises(TypeError):
        gk.budget("1GiB", keep=1)  # type: ignore[call-arg]


def nested_other() -> None:
    with gk.budget("1GiB"), gk.budget("1GiB"):
        pass


def nested_same() -> None:
    b = gk.budget("1GiB")
    with b, b:
        pass


def in_another_thread() -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            nested_other()
        except BaseException as error:
            errors.append(error)

    with gk.budget("1GiB"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    raise errors[0]


def in_a_backward() -> None:
    def enter(_g: torch.Tensor) -> None:
        with gk.budget("1GiB"):
            pass

    with gk.budget("1GiB"):
        h = deep(weight())
        h.register_hook(enter)
        loss_of(h).backward()


@pytest.mark.parametrize("program", [nested_other, nested_same, in_another_thread, in_a_backward], ids=lambda p: p.__name__)
def test_one_budget_at_a_time(program: Callable[[], None]) -> None:
    with pytest.raises(gk.GraphkeepError) as caught:
        program()
    check(caught.value)
    assert "budget" in caught.value.what
    assert caught.value.where is None or "test_budget_bad_input.py" in caught.value.where
    with gk.budget(8 * BYTES):  # the one that was refused has not broken anything
        w = weight()
        loss_of(deep(w)).backward()
    v = weight()
    loss_of(deep(v)).backward()
    assert torch.equal(w.grad, v.grad)


def test_the_outer_budget_goes_on_when_an_inner_one_was_refused() -> None:
    with gk.budget(4 * BYTES) as b:
        with pytest.raises(gk.GraphkeepError):
            with gk.budget(4 * BYTES):
                pass
        loss_of(deep(weight(), 4)).backward()
        assert b.recomputed_ops > 0


def test_leaving_a_budget_that_was_not_entered() -> None:
    b = gk.budget("1GiB")
    with pytest.raises(gk.GraphkeepError) as caught:
        b.__exit__(None, None, None)
    check(caught.value)


def test_an_error_names_the_line_that_did_not_fit_and_the_limit() -> None:
    with pytest.raises(gk.BudgetError) as caught:
        with gk.budget(BYTES // 2):
            loss_of(deep(weight(), 4)).backward()
    error = caught.value
    check(error)
    assert error.where is not None
    assert "test_budget_bad_input.py" in error.where or "budget_kinds.py" in error.where
    assert str(error.smallest) in str(error)
    assert "8.0 KiB" in str(error) or str(BYTES // 2) in str(error)
    assert "gk.budget(" in error.instead
