"""``python -m holdfast``: the command ``holdfast``."""

import sys

from holdfast.cli import main

sys.exit(main())
