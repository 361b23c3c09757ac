"""What happens to saves, for people and for their tools.

One line per save goes to ``logging.getLogger("holdfast")`` by itself. The rest is added where it is
wanted, and removed by its handle's ``close()``::

    holdfast.observe.jsonl("run/saves.jsonl")
    holdfast.observe.prometheus()
    holdfast.observe.trace("run/trace-{rank}.json")

Nothing of it can fail a save, and it runs in the save's own thread.
"""

from __future__ import annotations

from holdfast.events import Handle
from holdfast.observe.chrome_trace import mark_step, step, trace
from holdfast.observe.json_lines import jsonl, read_jsonl
from holdfast.observe.metrics import prometheus
from holdfast.observe.picture import plot

__all__ = ["Handle", "jsonl", "mark_step", "plot", "prometheus", "read_jsonl", "step", "trace"]
