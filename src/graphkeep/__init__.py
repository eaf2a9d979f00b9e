"""graphkeep: say which part of a computation graph lives on, see why it lives, and set what it may cost.

Importing this package patches nothing and prints nothing.
"""

from graphkeep._cut import cut as cut
from graphkeep._discard import Discarded as Discarded
from graphkeep._discard import Kept as Kept
from graphkeep._discard import discard as discard
from graphkeep._errors import ArgumentError as ArgumentError
from graphkeep._errors import ArgumentTypeError as ArgumentTypeError
from graphkeep._errors import BypassedCutError as BypassedCutError
from graphkeep._errors import ChangedGraphError as ChangedGraphError
from graphkeep._errors import ClosedCutError as ClosedCutError
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
from graphkeep.watch._findings import Finding as Finding
from graphkeep.watch._watch import watch as watch

__version__ = "0.1.0"
