"""Off the node: committed checkpoints are copied to a second place while the training goes on. See docs/drain.md."""

from holdfast.drain.options import Drain

__all__ = ["Drain"]
