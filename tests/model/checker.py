"""An exhaustive search of the states of a model, breadth first, with the shortest way to a violation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol


class Step(NamedTuple):
    """One transition. A fault (a kill, a power cut, an error) may happen, but no process may wait for one."""

    label: tuple[Any, ...]
    state: Any
    fault: bool = False


class Model(Protocol):
    """What the search asks of a model."""

    def initial(self) -> Any: ...
    def steps(self, state: Any) -> Iterable[Step]: ...
    def broken(self, before: Any, step: Step) -> str:
        """The promise that the step breaks, or ``""``."""
        ...

    def stuck(self, state: Any) -> str:
        """Who waits in this state, in which no step but a fault is possible, or ``""``."""
        ...

    def canonical(self, state: Any) -> Any:
        """One representative of all states that differ in nothing but the numbers of equal ranks."""
        ...


class Result(NamedTuple):
    """What a search has found."""

    violation: str  # empty: none
    trace: list[tuple[Any, ...]]  # the labels of the steps that lead to it
    states: int
    steps: int


def explore(model: Model, visit: Callable[[Any], None] | None = None, states_max: int = 2_000_000) -> Result:
    """Visits every state once. Ends at the first violation, which has a shortest trace.

    Raises RuntimeError where the model has more than `states_max` states: an unfinished search proves nothing.
    """
    first = model.canonical(model.initial())
    came_from: dict[Any, tuple[Any, tuple[Any, ...]] | None] = {first: None}
    queue = deque([first])
    taken = 0

    def trace(state: Any) -> list[tuple[Any, ...]]:
        labels = []
        while (origin := came_from[state]) is not None:
            state, label = origin
            labels.append(label)
        return labels[::-1]

    while queue:
        state = queue.popleft()
        if visit is not None:
            visit(state)
        progress = False
        for step in model.steps(state):
            taken += 1
            progress |= not step.fault
            if violation := model.broken(state, step):
                return Result(violation, [*trace(state), step.label], len(came_from), taken)
            after = model.canonical(step.state)
            if after not in came_from:
                came_from[after] = (state, step.label)
                queue.append(after)
        if not progress and (waiting := model.stuck(state)):
            return Result(waiting, trace(state), len(came_from), taken)
        if len(came_from) > states_max:
            raise RuntimeError(f"more than {states_max} states")
    return Result("", [], len(came_from), taken)
