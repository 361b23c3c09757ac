"""``python -m holdfast.megatron SCRIPT [ARGUMENT...]``: runs a Megatron script as it is, with Holdfast installed.

``-m MODULE`` runs a module. With torchrun: ``torchrun ... -m holdfast.megatron pretrain_gpt.py ...``.
"""

from __future__ import annotations

import os
import runpy
import sys

import holdfast.megatron


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if arguments else 2)
    holdfast.megatron.install()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            sys.exit("holdfast.megatron: -m needs a module")
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    # As `python SCRIPT` does; `python -m` has put the current directory there. With -P both put nothing.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
