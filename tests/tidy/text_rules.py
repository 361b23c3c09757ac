#!/usr/bin/env python3
"""Checks the text of the tree: lengths, header guards, first comments, unfinished work, words of comments, assertions."""

import re

import source_tree

LINES_MAX = 600
# The first page is read on a terminal, in one sitting.
README_LINES_MAX = 110
README_COLUMNS_MAX = 100
# Written apart so that this file does not complain of itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK", "st" + "ub",
                                           "not " + "implemented")) + r")\b")
CODE = (".cc", ".h", ".py", ".sh", ".cmake")
# The subject of a comment is a noun. Each bound is the tree's share of such words, per 100 words of C++ comments,
# rounded up: lower the bound with the share.
COMMENT = re.compile(r"(?:^|\s)///?<?\s(.*)")
INDEFINITE = set("who whom whoever what whatever somebody nobody anybody everybody others ones none".split())
PRONOUNS = INDEFINITE | set("it its itself they them their this these that those which one other both all".split())
SHARES_MAX = (("indefinite words", INDEFINITE, 0.35), ("pronouns", PRONOUNS, 5.7))

# Below the fork line, where a wrong state writes wrong bytes. Lower the bound with the share.
ASSERTED = ("runtime/worker/", "io_uring/")
ASSERTION_LINES_MAX = 27


def guard_of(relative):
    """The macro that guards a header: the path that an include names, and HOLDFAST in front."""
    path = re.sub(r"^runtime/include/holdfast/", "", relative)
    return "HOLDFAST_" + re.sub(r"[/.-]", "_", path).upper() + "_"


def check_comments(root):
    """One complaint for each kind of word with too large a share, at the file with most of them."""
    words = {}
    for path in source_tree.files(root, (".h", ".cc", ".cu")):
        text = " ".join(part for _, line in source_tree.lines(path) for part in COMMENT.findall(line))
        words[path.relative_to(root).as_posix()] = re.findall(r"[a-z']+", text.lower())
    total = sum(len(found) for found in words.values())
    for kind, chosen, share_max in SHARES_MAX:
        counts = {name: sum(word in chosen for word in found) for name, found in words.items()}
        if sum(counts.values()) * 100 > share_max * total:
            yield (f"{max(counts, key=counts.get)}:1: C++ comments have {sum(counts.values()) * 100 / total:.2f} "
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
    yield from check_comments(options.root)
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
