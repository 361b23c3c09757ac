"""States of a campaign: pure functions of a seed, so that expected bytes are computed and never kept."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from holdfast._tensor_kinds import as_bytes, in_memory, same_bytes

MIB = 1 << 20
DTYPES = (
    torch.float32, torch.bfloat16, torch.uint8, torch.float16, torch.int64, torch.float64, torch.bool,
    torch.complex64, torch.int8, torch.float8_e4m3fn,
)  # fmt: skip
_TEXT = '\u00e4\u2603 \\ " \n'


_POOL_WORDS = MIB // 8
_STRIDE = 0x9E3779B97F4A7C15  # odd, so that its multiples differ


@functools.cache
def _pool() -> torch.Tensor:
    """Random words, made once: drawing each state anew costs more than saving and loading it."""
    return torch.empty(_POOL_WORDS, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(1))


def pool_bytes() -> bytes:
    """The words that all states are made of."""
    return _pool().numpy().tobytes()


class Recipe(NamedTuple):
    """What a tensor is made of: words of the pool from `at` on, under a mask that follows from `key`.

    Two keys give other words at every place, and so do two tiles of the pool. A bool is the lowest bit of its byte.
    """

    dtype: torch.dtype
    shape: list[int]
    nbytes: int
    at: int
    key: int


def _words(at: int, key: int, count: int) -> torch.Tensor:
    words = torch.empty(count, dtype=torch.int64)
    for tile, begin in enumerate(range(0, count, _POOL_WORDS)):
        mask = (key + tile * _STRIDE) % (1 << 64) - (1 << 63)
        piece = words[begin : begin + _POOL_WORDS]
        first = min(len(piece), _POOL_WORDS - at)
        torch.bitwise_xor(_pool()[at : at + first], mask, out=piece[:first])
        torch.bitwise_xor(_pool()[: len(piece) - first], mask, out=piece[first:])
    return words


def _recipe(choose: random.Random, nbytes: int, wide: bool) -> Recipe:
    dtype = choose.choice(DTYPES) if wide else torch.float32
    count = nbytes // dtype.itemsize
    at, key = choose.randrange(_POOL_WORDS), choose.getrandbits(64)
    shape = [2, count // 2] if count % 2 == 0 and count and choose.random() < 0.5 else [count]
    return Recipe(dtype, shape, count * dtype.itemsize, at, key)


def _tensor(made: Recipe) -> torch.Tensor:
    data = _words(made.at, made.key, (made.nbytes + 7) // 8).view(torch.uint8)[: made.nbytes]
    return (data.remainder(2).to(torch.bool) if made.dtype == torch.bool else data.view(made.dtype)).reshape(made.shape)


def _sizes(choose: random.Random, spec: dict[str, Any]) -> list[int]:
    """Sizes in bytes that add up to about the wanted total: a few large ones and many small ones."""
    count, total = max(1, spec["tensors"]), spec["bytes"]
    weights = [choose.random() ** 8 + 1e-6 for _ in range(count)]
    scale = total / sum(weights)
    sizes = [int(w * scale) for w in weights]
    # Places around the page and the chunk of the digests are where the arithmetic goes wrong.
    edges = [0, 1, 4095, 4096, 4097]
    if total >= 2 * MIB or choose.random() < 0.1:
        edges += [4 * MIB - 1, 4 * MIB, 4 * MIB + 512]
    for i in range(min(2, count)):
        if choose.random() < 0.3:
            sizes[i] = choose.choice(edges)
    return sizes


def recipes(seed: int, save: int, rank: int, spec: dict[str, Any]) -> dict[str, dict[str, Recipe]]:
    """The tensors of `make`, by group and name."""
    shared = random.Random(f"{seed}:{save}")
    own = random.Random(f"{seed}:{save}:{rank}")
    made: dict[str, dict[str, Recipe]] = {}
    for group, choose in (("own", own), ("shared", shared)):
        half = {**spec, "tensors": spec["tensors"] // 2, "bytes": spec["bytes"] // 2}
        sizes = _sizes(choose, half)
        made[group] = {f"t{i}": _recipe(choose, nbytes, spec.get("wide", False)) for i, nbytes in enumerate(sizes)}
    return made


def flat(groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Members of groups with the names that they have without groups."""
    return {f"{group}.{name}": value for group, members in groups.items() for name, value in members.items()}


def make(seed: int, save: int, rank: int, spec: dict[str, Any]) -> dict[str, Any]:
    """The state of one rank at one save.

    Args:
        seed, save, rank: the key. ``id`` of the state names save and rank.
        spec: ``tensors`` and ``bytes``, counts; ``wide``, whether all dtypes appear; ``objects``.
    """
    state: dict[str, Any] = {"id": torch.tensor([save, rank]), "save": save}
    for group, members in recipes(seed, save, rank, spec).items():
        state[group] = {name: _tensor(made) for name, made in members.items()}
    if spec.get("objects"):
        groups = [{"rate": save / 3, "params": [0, save], "nothing": None}]  # as an optimizer has them
        state["values"] = {"text": _TEXT + str(save), "number": save / 7, "list": [save, None, b"\0" * 3], "groups": groups}
    return state


def as_plan(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a C++ program saves it: tensors alone, without groups."""
    return {"id": state["id"], **flat({group: state[group] for group in ("own", "shared")})}


def as_dcp(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """The state with the names that a DCP state dict needs: those of a rank are its own."""
    flat = {f"shared.{k}": v for k, v in state["shared"].items()}
    flat |= {f"r{rank}.{k}": v for k, v in state["own"].items()}
    flat[f"r{rank}.id"] = state["id"]
    if "values" in state:
        flat[f"r{rank}.values"] = dict(state["values"])
    return flat


def dcp_of_ranks(seed: int, save: int, ranks: int, spec: dict[str, Any]) -> dict[str, Any]:
    """The whole DCP checkpoint of all ranks."""
    whole: dict[str, Any] = {}
    for rank in range(ranks):
        whole |= as_dcp(make(seed, save, rank, spec), rank)
    return whole


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What DCP has a name for, with its path: what is no dict, and no list of dicts."""
    if not isinstance(state, dict) and not (isinstance(state, list) and any(isinstance(item, dict) for item in state)):
        yield path, state
        return
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def tensors(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its path."""
    return ((path, value) for path, value in leaves(state) if isinstance(value, torch.Tensor))


def mutate(state: Any) -> None:
    """Changes every byte of every tensor, and the values: the next step of a training."""
    for _, tensor in tensors(state):
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.view(torch.uint8).bitwise_not_()
    if isinstance(state, dict):
        for value in (state, *state.values()):
            if isinstance(value, dict) and "text" in value:
                value["text"] = "changed after the call"
                value["list"].append("changed")
                value["groups"][0]["nothing"] = "changed"


_OTHERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda _: 0, int: lambda n: ~n, float: lambda x: -x or 1.0, str: lambda text: text + "?",
    bytes: lambda data: data + b"?",
}  # fmt: skip


def unlike(state: Any) -> Any:
    """The same structure, in which every byte and every value is another one, to be filled by a load."""
    if isinstance(state, torch.Tensor):
        made = state.clone()
        mutate(made)
        return made
    if isinstance(state, dict):
        return {key: unlike(value) for key, value in state.items()}
    return [unlike(value) for value in state] if isinstance(state, list) else _OTHERS[type(state)](state)


def difference(found: Any, expected: Any, path: str = "") -> str:
    """What differs first, bit for bit; empty where nothing does."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{path} is no tensor"
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            return f"{path} is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
        a, b = as_bytes(in_memory(found)), as_bytes(in_memory(expected))
        if same_bytes(a, b):
            return ""
        wrong = (a != b).nonzero().flatten()
        return f"{path} differs in {len(wrong)} of {len(b)} bytes, the first is byte {int(wrong[0])}"
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            keys = sorted(set(found) ^ set(expected)) if isinstance(found, dict) else []
            return f"{path or 'the state'} has other keys: {keys[:5]}"
        for key, value in expected.items():
            said = difference(found[key], value, f"{path}.{key}" if path else str(key))
            if said:
                return said
        return ""
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        of_items = (difference(a, b, f"{path}.{i}") for i, (a, b) in enumerate(zip(found, expected, strict=True)))
        return next(filter(None, of_items), "")
    return "" if type(found) is type(expected) and found == expected else f"{path} is {found!r}, not {expected!r}"
