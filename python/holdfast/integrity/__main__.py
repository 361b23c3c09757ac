"""``python -m holdfast.integrity``."""

import sys

from holdfast.integrity import main

if __name__ == "__main__":
    sys.exit(main())
