#!/usr/bin/env python3
"""Checks which file of the Python package imports which (the table stands in python/README.md, too), and that what is imported exists."""

import ast

import source_tree

PACKAGE = "python/holdfast/"
FOLDERS = ("dcp", "drain", "observe", "lightning", "megatron", "nvrx", "cli", "integrity")
# A file may import those of the rows above its own.
ROWS = (
    ("_native", "_process", "errors"),
    ("_arguments", "_collector", "_completion", "_constructors", "_durable", "_devices", "_dtypes", "_framing", "_lineage",
     "_modules", "_names", "_packages", "_programs", "_ranks", "_records", "_regular"),
    ("_dcp_directories", "_pieces", "_plain"),
    ("_kinds", "_unpickle", "snapshots"),
    ("_tensor_kinds",),
    ("_late", "_log", "_merging", "_recent", "_state", "_torch_pickle", "directories"),
    ("_agreement", "_hf", "_others", "drain", "events"),
    ("_runtime",),
    ("capture", "handle"),
    ("_building", "_filling", "files", "loading", "saving"),
    ("dcp", "observe"),
    ("lightning", "megatron", "recovery"),
    ("checkpointer", "nvrx", "torchtitan"),
    ("cli", "integrity"),
    ("__init__", "__main__"),
)
ALSO = {
    "_log": ("events",),  # its types; `events` calls it
    "_recent": ("events",),  # likewise
    "_building": ("loading",),  # its types
    "_filling": ("_building", "loading"),
    "loading": ("_building", "_filling"),
}
# Files that share private names: parts of one class.
TOGETHER = ({"loading", "_building", "_filling"},)
# Private by the look, public by the standard library's documentation.
NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")


def imported(tree):
    """Dotted names below the package that a file imports, with their line, in any scope."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            parts = node.module.split(".")
            if parts[0] == "holdfast":
                for alias in node.names:
                    yield node.lineno, [*parts[1:], alias.name]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "holdfast" and len(parts) > 1:
                    yield node.lineno, parts[1:]


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(tree):
    """Private names that a file defines: functions, classes, variables, attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def foreign(tree):
    """Names that a file has for modules and objects of other packages."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if (getattr(node, "module", None) or alias.name).split(".")[0] != "holdfast":
                    yield (alias.asname or alias.name).split(".")[0]


def bound(body):
    """Names that statements bind in their own scope; None stands for a module's function that makes others."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield None if node.name == "__getattr__" else node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        else:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            for part in ("body", "orelse", "finalbody"):
                yield from bound(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from bound(handler.body)


def modules_of(trees):
    """What each module of the package binds, by its dotted name below the package."""
    modules = {(): {None}, ("_native",): {None}}
    for relative, tree in trees.items():
        parts = relative.removeprefix(PACKAGE).removesuffix(".py").split("/")
        modules[tuple(p for p in parts if p != "__init__")] = set(bound(tree.body))
    return modules


def check_existence(relative, tree, modules):
    """An import in a function fails only when that runs; in a test, that is late."""
    for line, names in imported(tree):
        for length in range(len(names), -1, -1):
            known, missing = modules.get(tuple(names[:length])), names[length:]
            if known is not None:
                break
        if missing and not (len(missing) == 1 and (None in known or missing[0] in known)):
            yield f"{relative}:{line}: there is no {'.'.join(['holdfast', *names])}"


def check_imports(relative, unit, tree):
    rows = {entry: number for number, row in enumerate(ROWS) for entry in row}
    for line, names in imported(tree):
        used = names[0]
        if used in rows and unit != used and rows[used] >= rows[unit] and used not in ALSO.get(unit, ()):
            yield f"{relative}:{line}: {unit} may not import {used}"
        if is_private(names[-1]) and len(names) > 1:
            yield f"{relative}:{line}: {names[-1]} is private to {'.'.join(names[:-1])}"


def check_attributes(relative, tree, own, others):
    strange = set(foreign(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in others - own:
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id in strange):
            yield f"{relative}:{node.lineno}: {node.attr} is private to another file"


def check_table(root):
    """The table of python/README.md has the rows from here."""
    path = root / "python/README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else None
    for number, row in enumerate(ROWS, start=1):
        files = ", ".join(f"`{entry}/`" if entry in FOLDERS else f"`{entry}`" for entry in row)
        if text is not None and f"| {number} | {files} |\n" not in text:
            yield f"python/README.md:1: its table has no row {number} of {files}"


def check(options):
    yield from check_table(options.root)
    every = {}
    for path in source_tree.files(options.root, (".py",)):
        every[path.relative_to(options.root).as_posix()] = ast.parse(path.read_text(encoding="utf-8"))
    trees = {f: t for f, t in every.items() if f.startswith(PACKAGE)}
    modules = modules_of(trees)
    for relative, tree in every.items():
        yield from check_existence(relative, tree, modules)
    units = {f: f.removeprefix(PACKAGE).split("/")[0].removesuffix(".py") for f in trees}
    private = {f: {n for n in defined(t) if is_private(n)} - {*NAMED_TUPLES} for f, t in trees.items()}
    for relative, tree in trees.items():
        unit = units[relative]
        if not any(unit in row for row in ROWS):
            yield f"{relative}:1: {unit} is not in the table of tests/tidy/import_rules.py"
            continue
        yield from check_imports(relative, unit, tree)
        parts = next((p for p in TOGETHER if unit in p), ())
        own = {n for f in trees if f == relative or units[f] in parts for n in private[f]}
        others = {n for f in trees for n in private[f]}
        yield from check_attributes(relative, tree, own, others)


if __name__ == "__main__":
    source_tree.run(check, __doc__)
