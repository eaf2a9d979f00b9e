"""``python -m graphkeep``."""

import sys

from graphkeep.cli import main

sys.exit(main())
