#!/usr/bin/env python3
"""Checks the text of the tree: lengths, header guards, first comments, unfinished work, words of comments, assertions."""

import ast
import io
import re
import tokenize

import source_tree

LINES_MAX = 600
# The first page is read on a terminal, in one sitting.
README_LINES_MAX = 110
README_COLUMNS_MAX = 100
# Written apart so that this file does not complain of itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK", "st" + "ub",
                                           "not " + "implemented")) + r")\b")
CODE = (".cc", ".h", ".py", ".sh", ".cmake")
COMMENT = re.compile(r"(?:^|\s)///?<?\s(.*)")
CODE_WORDS = re.compile(r"```.*?```|`[^`]*`|\bNone\b", re.DOTALL)
PACKAGE = "python/holdfast/"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
INDEFINITE = set("who whom whoever what whatever somebody nobody anybody everybody others ones none".split())
PRONOUNS = INDEFINITE | set("it its itself they them their this these that those which one other both all".split())

# Below the fork line, where a wrong state writes wrong bytes. Lower the bound with the share.
ASSERTED = ("runtime/worker/", "io_uring/")
ASSERTION_LINES_MAX = 27


def guard_of(relative):
    """The macro that guards a header: the path that an include names, and HOLDFAST in front."""
    path = re.sub(r"^runtime/include/holdfast/", "", relative)
    return "HOLDFAST_" + re.sub(r"[/.-]", "_", path).upper() + "_"


def of_cpp(path):
    """The comments of a C++ file."""
    return " ".join(part for _, line in source_tree.lines(path) for part in COMMENT.findall(line))


def of_python(path):
    """The docstrings and comments of a Python file, without code."""
    text = path.read_text(encoding="utf-8")
    parts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    parts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return CODE_WORDS.sub(" ", " ".join(parts))


def of_page(path):
    """The text of a Markdown page, without code."""
    return CODE_WORDS.sub(" ", path.read_text(encoding="utf-8"))


# The subject of a sentence is a noun. Each bound is the tree's share of such words, per 100 words, rounded up: lower the
# bound with the share.
SHARES_MAX = (
    ("C++ comments", of_cpp, (".h", ".cc", ".cu"), "", (("indefinite words", INDEFINITE, 0.35), ("pronouns", PRONOUNS, 5.7))),
    ("the package's comments", of_python, (".py",), PACKAGE, (("indefinite words", INDEFINITE, 1.9),)),
    ("pages", of_page, (".md",), "", (("indefinite words", INDEFINITE, 0.75),)),
)


def check_shares(root):
    """One complaint for each kind of text and of word with too large a share, at the file with most such words."""
    for texts, text_of, suffixes, folder, kinds in SHARES_MAX:
        words = {}
        for path in source_tree.files(root, suffixes):
            relative = path.relative_to(root).as_posix()
            if relative.startswith(folder):
                words[relative] = re.findall(r"[a-z']+", text_of(path).lower())
        total = sum(len(found) for found in words.values())
        for kind, chosen, share_max in kinds:
            counts = {name: sum(word in chosen for word in found) for name, found in words.items()}
            if sum(counts.values()) * 100 > share_max * total:
                yield (f"{max(counts, key=counts.get)}:1: {texts} have {sum(counts.values()) * 100 / total:.2f} "
                       f"{kind} in 100 words, at most {share_max}: write the noun")


def check_assertions(root):
    """One complaint if the rooms of the worker have too few assertions, at the file that lacks most of them."""
    lacking, total = {}, 0
    for path in source_tree.files(root, (".cc",)):
        relative = path.relative_to(root).as_posix()
        if relative.startswith(ASSERTED):
            text = path.read_text(encoding="utf-8")
            lacking[relative] = len(text.splitlines()) / ASSERTION_LINES_MAX - text.count("HOLDFAST_ASSERT(")
            total += lacking[relative]
    if total > 1:
        yield (f"{max(lacking, key=lacking.get)}:1: fewer than one assertion in {ASSERTION_LINES_MAX} lines: assert "
               "indices from shared memory, values before they are decremented, and what a step relies on")


def check(options):
    yield from check_shares(options.root)
    yield from check_assertions(options.root)
    for path in source_tree.files(options.root):
        relative = path.relative_to(options.root).as_posix()
        count = 0
        text = []
        for number, line in source_tree.lines(path):
            count = number
            text.append(line)
            match = UNFINISHED.search(line)
            if match:
                yield f"{relative}:{number}: unfinished: {match.group(0)}"
            if path.suffix in CODE and line != line.rstrip():
                yield f"{relative}:{number}: blanks at the end of the line"
        if path.suffix in CODE and count > LINES_MAX:
            yield f"{relative}:{count}: longer than {LINES_MAX} lines: a file holds one idea"
        if relative == "README.md":
            if count > README_LINES_MAX:
                yield f"README.md:{count}: longer than {README_LINES_MAX} lines: figures and limits belong to docs/"
            for number, line in enumerate(text, 1):
                if len(line) > README_COLUMNS_MAX:
                    yield f"README.md:{number}: wider than {README_COLUMNS_MAX} columns"
        if path.suffix == ".h":
            guard = guard_of(relative)
            if f"#ifndef {guard}" not in text or f"#define {guard}" not in text:
                yield f"{relative}:1: the header guard is {guard}"
            if not text or not text[0].startswith("//"):
                yield f"{relative}:1: a header begins with a comment that says what it holds"


if __name__ == "__main__":
    source_tree.run(check, __doc__)
