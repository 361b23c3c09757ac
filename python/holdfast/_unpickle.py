"""Objects are read back through an allow-list: a pickle may otherwise run any code.

The list holds for every opcode and not for names alone. Only what the list has is called, only what
the list's calls have made is given a state or items, and never a class, a function or a dtype.
"""

from __future__ import annotations

import _compat_pickle
import decimal
import enum
import importlib
import io
import pickle
import pickletools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from holdfast._constructors import (
    CONSTRUCTORS,
    STATES,
    STORAGES,
    Constructor,
    built_dtype,
    require,
    set_array,
    storage_at,
)
from holdfast._plain import name_of
from holdfast.errors import Error

_TUPLE_DEPTH_MAX = 200
# What a pickle may have copied and hashed, for each of its bytes and at the least.
_UNITS_PER_BYTE = 64
_UNITS_MIN = 16 << 20
_UNITS_PER_COPY = 16

_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
# Results of a call that a state would change for the whole process.
_SHARED = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
           *_TORCH_VALUES)  # fmt: skip
_BUILD: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]
_NESTING = (tuple, slice)
# Their hash is kept, or takes no time.
_HASHED_ONCE = frozenset([type(None), bool, float, complex, str, bytes])
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)

# Opcodes that put together plain values, or keep and find them. What is neither here nor below is
# refused: instances of old classes, extension codes, buffers from outside of the pickle.
_PLAIN_OPCODES = """
    PROTO FRAME STOP POP POP_MARK DUP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2
    LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES
    BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT
    EMPTY_SET LIST GLOBAL STACK_GLOBAL PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE
    BINPERSID
""".split()


def safe_globals() -> dict[str, Any]:
    """What the user trusts in every load: ``torch.serialization.add_safe_globals`` and ``safe_globals``.

    By "module.name". An entry with a name of its own is what pickles call by that name.
    """
    found: dict[str, Any] = {}
    for entry in torch.serialization.get_safe_globals():
        item, name = entry if isinstance(entry, tuple) else (entry, name_of(entry))
        found[name.replace(":", ".")] = item
    return found


def refusal(subject: str, names: Iterable[str]) -> Error:
    """That `names` are not on the list, all in one error."""
    listed = sorted(names)
    return Error(
        "PERMISSION_DENIED",
        f"{subject}: it needs {', '.join(listed)}, which {'is' if len(listed) == 1 else 'are'} not "
        f"on the list of what may be made; if you trust this checkpoint, pass allow={listed!r}",
    )


def _enum_member(pickle: Any, owner: Any, name: Any) -> Any:
    """Stands in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle a member of an enum.

    Raises:
        Error: PERMISSION_DENIED for any other use of it.
    """
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner[name]
    raise Error("PERMISSION_DENIED", f"it asks {owner!r} for {name!r}, which is no enum's member")


def _full_name(module: str, name: str, protocol: int) -> str:
    """The name of today: up to protocol 2, pickles have those of Python 2."""
    if protocol < 3:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    # Python 3.13's name of what others have in pathlib.
    return f"{'pathlib' if module == 'pathlib._local' else module}:{name}"


def names(data: bytes) -> set[str]:
    """All names that a pickle asks for, found without making anything."""
    found: set[str] = set()
    pushed: deque[Any] = deque([None, None], maxlen=2)
    memo: dict[int, Any] = {}
    protocol = 0
    for opcode, given, _place in pickletools.genops(data):
        argument: Any = given
        if opcode.name == "PROTO":
            protocol = argument
        elif opcode.name == "GLOBAL":
            module, _, name = argument.partition(" ")
            found.add(_full_name(module, name, protocol))
        elif opcode.name == "STACK_GLOBAL":
            found.add(_full_name(str(pushed[0]), str(pushed[1]), protocol))
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
        elif opcode.name.endswith("PUT"):
            memo[argument] = pushed[-1]
        else:
            pushed.append(memo.get(argument) if opcode.name.endswith("GET") else argument)
    return found


def unlisted(data: bytes, listed: Container[str] = CONSTRUCTORS) -> set[str]:
    """The names that a pickle asks for and that are neither on the list nor the user's safe globals."""
    safe = safe_globals()
    return {
        n for n in names(data)
        if n not in listed and n != "builtins:getattr" and not _is_torch_value(n) and n.replace(":", ".") not in safe
    }  # fmt: skip


class Unpickler(pickle._Unpickler):
    """Makes what is on the list, members of enums on it included, and refuses all else.

    Args:
        data: the pickle.
        operation: begins each message, "load NAME".
        allow: names ("module:Class") that the caller trusts with any arguments and any state.
        place: gives the device of a tensor's memory for the one that it was saved from; by default that one.
    """

    dispatch = {
        getattr(pickle, code)[0]: pickle._Unpickler.dispatch[getattr(pickle, code)[0]] for code in _PLAIN_OPCODES
    }
    constructors: Mapping[str, Constructor | None] = CONSTRUCTORS
    states = STATES

    # Of the class above, while it loads.
    proto: int
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, operation: str, allow: frozenset[str] = frozenset(),
                 place: Callable[[str], str] | None = None) -> None:
        self.place = place or self._where_saved
        self._stream = io.BytesIO(data)
        super().__init__(self._stream)
        self._data = data
        self.operation = operation
        self._allow = allow
        self._safe = safe_globals()
        self._units = _UNITS_MIN + _UNITS_PER_BYTE * len(data)
        self._calls: dict[int, tuple[Any, Constructor | None]] = {}  # by id; None: as it is
        self._trusted: set[type] = set()  # of what allowed calls have made
        self._nested: dict[int, tuple[Any, int, int]] = {}  # by id, of tuples: depth, units of a hash

    # ---- Budget.

    def _charge(self, units: int) -> None:
        self._units -= units
        if self._units < 0:
            raise Error(
                "DATA_LOSS",
                f"{self.operation}: its pickle of {len(self._data)} bytes copies or hashes the same "
                "values over and over; no save writes that",
            )

    def charge_copy(self, count: int) -> None:
        self._charge(_UNITS_PER_COPY * count)

    def charge_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:
            if type(key) not in _HASHED_ONCE:
                self._charge(self._hash_of(key)[1])

    def _hash_of(self, value: Any) -> tuple[int, int]:
        """Depth of the recursion, and units, of what a hash goes through."""
        if isinstance(value, _NESTING):
            _, depth, units = self._nested.get(id(value), (value, 1, len(_parts(value))))
            return depth, units
        if isinstance(value, int):
            return 0, value.bit_length() >> 6
        if isinstance(value, range):
            return 0, (value.start.bit_length() + value.stop.bit_length() + value.step.bit_length()) >> 6
        if isinstance(value, decimal.Decimal) or type(value).__module__ == "numpy":
            return 0, sys.getsizeof(value) >> 1
        return 0, 0

    def _checked(self, made: Any) -> Any:
        """Bounds the depth: the hash of a tuple is recursive, and overflows the stack of C."""
        parts = _parts(made)
        inner = [self._hash_of(part) for part in parts if type(part) not in _HASHED_ONCE]
        depth, units = 1 + max((d for d, _ in inner), default=0), sum(u for _, u in inner)
        if depth == 1 and not units:
            return made  # nearly all of them
        if depth > _TUPLE_DEPTH_MAX:
            raise pickle.UnpicklingError(f"tuples in tuples, {depth} deep")
        self._nested[id(made)] = (made, depth, len(parts) + units)
        return made

    # ---- Names.

    def find_class(self, module: str, name: str) -> Any:
        full = _full_name(module, name, self.proto)
        if full == "builtins:getattr":
            return self._callable(getattr, _enum_member)
        if full not in self.constructors and full not in self._allow:
            if _is_torch_value(full):
                return vars(torch)[name]
            if full.replace(":", ".") in self._safe:
                return self._callable(self._safe[full.replace(":", ".")], None)
            raise refusal(self.operation, self._missing() | {full})
        module, _, path = full.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        if full not in self.constructors:
            return self._callable(found, None)
        constructor = self.constructors[full]
        return found if constructor is None else self._callable(found, constructor)

    def _callable(self, found: Any, constructor: Constructor | None) -> Any:
        self._calls[id(found)] = (found, constructor)
        return found

    def _missing(self) -> set[str]:
        try:
            return unlisted(self._data, self.constructors) - self._allow
        except Exception:  # damaged further on; the one that was found is named
            return set()

    # ---- Calls.

    def _call(self, function: Any, args: Any, make: Callable[..., Any]) -> Any:
        entry = self._calls.get(id(function))
        if entry is None:
            raise pickle.UnpicklingError(f"it calls {function!r:.80}")
        if type(args) is not tuple:
            raise pickle.UnpicklingError("it calls with something that is no tuple")
        if entry[1] is not None:
            made = entry[1](self, *args)
        else:
            made = make(*args)
            if not isinstance(made, _SHARED):
                self._trusted.add(type(made))
        return self._checked(made) if isinstance(made, _NESTING) else made

    def call(self, function: Any, args: Any) -> Any:
        return self._call(function, args, function)

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)

    def _new(self) -> None:
        args = self.stack.pop()
        cls = self.stack.pop()
        self.append(self._call(cls, args, lambda *a: cls.__new__(cls, *a)))

    def _new_ex(self) -> None:
        named, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if type(named) is not dict or named and self._calls.get(id(cls), (None, cls))[1]:
            raise pickle.UnpicklingError(f"arguments by name for {cls!r:.80}")
        self.append(self._call(cls, args, lambda *a: cls.__new__(cls, *a, **named)))

    def _where_saved(self, location: str) -> str:
        if location.startswith("cuda") and not torch.cuda.is_available():
            raise Error(
                "FAILED_PRECONDITION",
                f"{self.operation}: a tensor in it was saved from {location}, and there is no CUDA here; load it where there "
                "is, or save the tensor beside the object",
            )
        return location

    def storage_of(self, data: bytes) -> Any:
        self.charge_copy(len(data))
        inner = _StorageUnpickler(data, self.operation, place=self.place)
        inner._units = self._units
        try:
            return inner.storage()
        finally:
            self._units = inner._units

    # ---- States and items.

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        kind = type(target)
        numpy = sys.modules.get("numpy")
        if kind in self.states:
            self.check_names(state)
            self.states[kind](self, target, state)
        elif numpy is not None and isinstance(target, numpy.dtype):
            self._replace(target, built_dtype(target, state))
        elif numpy is not None and isinstance(target, numpy.ndarray):
            set_array(self, target, state)
        elif kind in self._trusted:
            self.check_names(state)
            self.stack.append(state)
            _BUILD(self)
        else:
            raise pickle.UnpicklingError(f"it gives a state to {target!r:.80}")

    def check_names(self, state: Any) -> None:
        """Attributes are no methods: copying calls ``__reduce_ex__`` wherever it finds it."""
        for part in state if type(state) is tuple else (state,):
            for name in part if type(part) is dict else ():
                if isinstance(name, str) and name[:2] == "__" == name[-2:]:
                    raise pickle.UnpicklingError(f"an attribute {name!r:.80}")

    def _replace(self, old: Any, new: Any) -> None:
        self.stack[-1] = new
        for key in reversed(self.memo):  # it was put there just before its state
            self._charge(1)
            if self.memo[key] is old:
                self.memo[key] = new
                return

    def _append_to(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (list, deque) and type(target) not in self._trusted:
            raise pickle.UnpicklingError(f"it appends to {target!r:.80}")
        if hasattr(target, "extend"):
            target.extend(items)
        else:
            for item in items:
                target.append(item)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _MAPPINGS and type(target) not in self._trusted:
            raise pickle.UnpicklingError(f"it sets items of {target!r:.80}")
        self.charge_keys(items[::2])
        for i in range(0, len(items), 2):
            target[items[i]] = items[i + 1]

    def _add_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set and type(target) not in self._trusted:
            raise pickle.UnpicklingError(f"it adds to {target!r:.80}")
        self.charge_keys(items)
        for item in items:
            target.add(item)

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _frozenset(self) -> None:
        items = self.pop_mark()
        self.charge_keys(items)
        self.append(frozenset(items))

    def _bytearray8(self) -> None:
        # The bytes first: the length may be any, and memory for it would be taken before.
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    def _push_tuple(self, items: Iterable[Any]) -> None:
        self.append(self._checked(tuple(items)))

    for _code, _method in {
        pickle.REDUCE: _reduce,
        pickle.NEWOBJ: _new,
        pickle.NEWOBJ_EX: _new_ex,
        pickle.BUILD: _build,
        pickle.APPEND: lambda self: self._append_to(self._pop(1)),
        pickle.APPENDS: lambda self: self._append_to(self.pop_mark()),
        pickle.SETITEM: lambda self: self._set_items(self._pop(2)),
        pickle.SETITEMS: lambda self: self._set_items(self.pop_mark()),
        pickle.ADDITEMS: lambda self: self._add_items(self.pop_mark()),
        pickle.DICT: _dict,
        pickle.FROZENSET: _frozenset,
        pickle.BYTEARRAY8: _bytearray8,
        pickle.TUPLE: lambda self: self._push_tuple(self.pop_mark()),
        pickle.TUPLE1: lambda self: self._push_tuple(self._pop(1)),
        pickle.TUPLE2: lambda self: self._push_tuple(self._pop(2)),
        pickle.TUPLE3: lambda self: self._push_tuple(self._pop(3)),
    }.items():
        dispatch[_code[0]] = _method


class _StorageUnpickler(Unpickler):
    """Reads a storage as plain pickles contain it, in the older format of ``torch.save``: five pickles, and its memory."""

    constructors = STORAGES

    def __init__(self, data: bytes, operation: str, place: Callable[[str], str]) -> None:
        super().__init__(data, operation, place=place)
        self._safe = {}

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def storage(self) -> Any:
        require(self.load() == torch.serialization.MAGIC_NUMBER, "no storage of torch.save")
        version, _system, pid, keys = (self.load() for _ in range(4))
        require(version == torch.serialization.PROTOCOL_VERSION, f"version {version!r:.20} of a storage")
        memory = self._stream.read()[8:]  # behind the number of elements
        require(type(pid) is tuple and pid[5:] == (None,) and keys == [pid[2]], "a storage that is a view")
        return storage_at(pid, lambda key: memory, self.place)


def _parts(value: Any) -> tuple[Any, ...]:
    return (value.start, value.stop, value.step) if isinstance(value, slice) else value


def _is_torch_value(full: str) -> bool:
    module, _, name = full.partition(":")
    return module == "torch" and isinstance(vars(torch).get(name), _TORCH_VALUES)


def run(unpickler: Unpickler, operation: str) -> Any:
    """Unpickles; what is wrong with the pickle is an error of `operation`.

    Raises:
        Error: PERMISSION_DENIED naming all that it needs, DATA_LOSS for what is no pickle.
    """
    try:
        return unpickler.load()
    except Error:
        raise
    except Exception as error:
        raise Error("DATA_LOSS", f"{operation}: its pickle cannot be read: {error}") from error


def loads(data: bytes, entry: str, allow: Iterable[Any] = (), place: Callable[[str], str] | None = None) -> Any:
    """Unpickles one object; `place` is that of `Unpickler`.

    Raises:
        Error: as of `run`.
    """
    operation = f"load {entry}"
    allowed = frozenset(name_of(item) for item in allow)
    return run(Unpickler(data, operation, allowed, place), operation)
