"""Checks the wheels in a folder against what they promise, and prints what they are as a table.

    inspect_wheels.py [--write] DIR

A wheel passes if auditwheel gives it the platform of its name, its files need the C library alone, the extension module exports its
initialization alone, no stack is executable, segments fit pages of 64 KiB where the processor has them, and it has at most 4 MiB.
`--write` puts the table into docs/install.md. Exit status 1 if a wheel does not pass. Needs auditwheel and pyelftools.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import page_part

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- wheels: written by tools/build-wheels.sh --write -->", "<!-- wheels: end -->"
WHEEL_BYTES_MAX = 4 << 20
# What every system with glibc has, and the linker of each processor.
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libresolv.so.2", "libutil.so.1",
             "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
PAGE_BYTES = {"x86_64": 1 << 12, "aarch64": 1 << 16}
FILES = ("holdfast/_native", *(f"holdfast/bin/{name}" for name in ("holdfast-worker", "verify-checkpoint", "holdfast-doctor", "holdfast-demo")))


class Binary:
    """What the loader sees of one file of a wheel."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.bytes = path.stat().st_size
        self.needed: list[str] = []
        self.exported: list[str] = []
        self.problems: list[str] = []
        with open(path, "rb") as file:
            elf = ELFFile(file)
            self._read(elf)

    def _read(self, elf: ELFFile) -> None:
        page = PAGE_BYTES["aarch64" if elf["e_machine"] == "EM_AARCH64" else "x86_64"]
        for segment in elf.iter_segments():
            if segment["p_type"] == "PT_GNU_STACK" and segment["p_flags"] & 1:
                self.problems.append("its stack is executable")
            if segment["p_type"] == "PT_LOAD" and segment["p_align"] % page:
                self.problems.append(f"a segment is aligned to {segment['p_align']} bytes; pages may have {page}")
        if (dynamic := elf.get_section_by_name(".dynamic")) is not None:
            for tag in dynamic.iter_tags():
                if tag.entry.d_tag == "DT_NEEDED":
                    self.needed.append(tag.needed)
                if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    self.problems.append("it has a path for libraries")
        if (symbols := elf.get_section_by_name(".dynsym")) is not None:
            self.exported = sorted(
                s.name for s in symbols.iter_symbols() if s.name and s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["bind"] != "STB_LOCAL"
            )
            versions = elf.get_section_by_name(".gnu.version")
            # A symbol of the C library has the version that brought it; one without is not in the C library that was linked with.
            self.problems += [
                f"nothing that it is linked with has {s.name}"
                for i, s in enumerate(symbols.iter_symbols())
                if s["st_shndx"] == "SHN_UNDEF" and s["st_info"]["bind"] == "STB_GLOBAL"
                and versions.get_symbol(i)["ndx"] in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL") and not re.match("_?Py", s.name)
            ]
        self.problems += [f"it needs {library}" for library in self.needed if library not in C_LIBRARY]
        if not self.name.endswith(".so"):
            self.exported = []  # a program's are its copies of the C library's variables, such as stderr
        self.problems += [f"it exports {symbol}" for symbol in self.exported if symbol != "PyInit__native"]


def audited(wheel: Path) -> str:
    """The platform that auditwheel gives a wheel."""
    done = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False)
    text = " ".join((done.stdout + done.stderr).split())
    found = re.search(r'(?:consistent with the following platform tag|platform tag): "([^"]+)"', text)
    return found[1] if found else f"none: {text[-200:]}"


def inspect(wheel: Path) -> tuple[list[str], list[str]]:
    """The rows of a wheel in the tables, and what is wrong with it."""
    arch = "aarch64" if "aarch64" in wheel.name else "x86_64"
    platform = audited(wheel)
    problems = []
    if not re.fullmatch(rf"manylinux_2_(5|12|17|24|26|27|28)_{arch}", platform):
        problems.append(f"auditwheel calls it {platform}")
    if wheel.stat().st_size > WHEEL_BYTES_MAX:
        problems.append(f"it has {wheel.stat().st_size} bytes; {WHEEL_BYTES_MAX} are allowed")
    rows = []
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for wanted in FILES:
            name = next((n for n in names if n == wanted or n.startswith(wanted + ".") and n.endswith(".so")), None)
            if name is None:
                problems.append(f"{wanted} is not in it")
                continue
            binary = Binary(name, Path(archive.extract(name, folder)))
            problems += [f"{name}: {p}" for p in binary.problems]
            needed = ", ".join(f"`{n}`" for n in binary.needed) or "nothing"
            exported = ", ".join(f"`{n}`" for n in binary.exported) or "nothing"
            rows.append(f"| | `{name.removeprefix('holdfast/')}` | {binary.bytes >> 10} KiB | {needed} | {exported} |")
    size = f"{wheel.stat().st_size / (1 << 20):.1f} MiB"
    return [f"| `{wheel.name}` | {platform} | {size} | | |", *rows], problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/install.md")
    arguments = parser.parse_args()
    lines = ["| wheel | file, or platform by `auditwheel show` | size | libraries that it needs | symbols that it exports |",
             "| --- | --- | --- | --- | --- |"]
    status = 0
    wheels = sorted(arguments.directory.glob("holdfast-*.whl"))
    for wheel in wheels:
        rows, problems = inspect(wheel)
        lines += rows
        for problem in problems:
            print(f"{wheel.name}: {problem}", file=sys.stderr)
            status = 1
    if not wheels:
        print(f"{arguments.directory}: no wheels of holdfast", file=sys.stderr)
        return 1
    table = "\n".join(lines)
    print(table)
    if arguments.write and status == 0:
        PAGE.write_text(page_part.replaced(PAGE.read_text(), BEGIN, END, table))
    return status


if __name__ == "__main__":
    sys.exit(main())
