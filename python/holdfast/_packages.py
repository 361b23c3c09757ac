"""Other packages: which of them are installed."""

from __future__ import annotations

import importlib.util


def is_installed(name: str) -> bool:
    """Whether a module, at any depth of packages, can be imported, without importing it. Packages around it are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a package around it
        return False
    except ValueError:  # imported, without a specification
        return True
