"""graphkeep: say which part of a computation graph lives on, see why it lives, and set what it may cost.

Importing this package patches nothing and prints nothing. It does not import torch either before one of its names is used, so
that `graphkeep run` can start before the program has set the environment that torch reads.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from graphkeep._budget._budget import budget as budget
    from graphkeep._budget._report import BudgetReport as BudgetReport
    from graphkeep._budget._report import Share as Share
    from graphkeep._cut import cut as cut
    from graphkeep._discard import Discarded as Discarded
    from graphkeep._discard import Kept as Kept
    from graphkeep._discard import discard as discard
    from graphkeep._errors import ArgumentError as ArgumentError
    from graphkeep._errors import ArgumentTypeError as ArgumentTypeError
    from graphkeep._errors import BudgetError as BudgetError
    from graphkeep._errors import BypassedCutError as BypassedCutError
    from graphkeep._errors import ChangedGraphError as ChangedGraphError
    from graphkeep._errors import ClosedCutError as ClosedCutError
    from graphkeep._errors import DataFileError as DataFileError
    from graphkeep._errors import FreedGraphError as FreedGraphError
    from graphkeep._errors import GraphkeepError as GraphkeepError
    from graphkeep._errors import LostGradientWarning as LostGradientWarning
    from graphkeep._errors import NotFreedWarning as NotFreedWarning
    from graphkeep._errors import NotInGraphError as NotInGraphError
    from graphkeep._errors import ReplayError as ReplayError
    from graphkeep._errors import WatchFailedWarning as WatchFailedWarning
    from graphkeep._explain import Explanation as Explanation
    from graphkeep._explain import KeptBy as KeptBy
    from graphkeep._explain import Postmortem as Postmortem
    from graphkeep._explain import explain as explain
    from graphkeep._infer import Inference as Inference
    from graphkeep._infer import infer as infer
    from graphkeep._install import install as install
    from graphkeep._keep import backward as backward
    from graphkeep._plan import Plan as Plan
    from graphkeep._watch._finding import Finding as Finding
    from graphkeep._watch._watch import watch as watch

__version__ = "0.1.0"

_HOMES = {
    "_budget._budget": ("budget",),
    "_budget._report": ("BudgetReport", "Share"),
    "_cut": ("cut",),
    "_discard": ("Discarded", "Kept", "discard"),
    "_errors": (
        "ArgumentError", "ArgumentTypeError", "BudgetError", "BypassedCutError", "ChangedGraphError", "ClosedCutError",
        "DataFileError", "FreedGraphError", "GraphkeepError", "LostGradientWarning", "NotFreedWarning", "NotInGraphError",
        "ReplayError", "WatchFailedWarning",
    ),
    "_explain": ("Explanation", "KeptBy", "Postmortem", "explain"),
    "_infer": ("Inference", "infer"),
    "_install": ("install",),
    "_keep": ("backward",),
    "_plan": ("Plan",),
    "_watch._finding": ("Finding",),
    "_watch._watch": ("watch",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str) -> _Any:
    """A public name, imported when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'graphkeep' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f"graphkeep.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: _Any) -> None:
    """For ``%load_ext graphkeep``."""
    _import_module("graphkeep.integrations.jupyter").load(ipython)
