"""The complete checkpoints of a directory of a place, of both formats. Those with missing files count as damaged."""

from __future__ import annotations

import os
from typing import Any

from holdfast import _dcp_directories, _names, _native
from holdfast.drain.judging import FORMATS
from holdfast.drain.places import Info, age_of
from holdfast.errors import Error, of_system


class Listing:
    """Lists a directory again and again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._whole: dict[str, object] = {}  # stamps of plain checkpoints whose files were all there, by path

    def complete(self, format: str = "") -> tuple[list[Info], list[str]]:
        """As of a `Place`."""
        found: list[Info] = []
        passed_over: list[str] = []
        unreadable: Error | None = None
        for of in FORMATS:
            if format not in ("", of):
                continue
            try:
                complete, why = _dcp_directories.list_complete(self._path) if of == "dcp" else self._plain()
            except Error as error:
                if error.code == "RESOURCE_EXHAUSTED":
                    raise
                # A format of which none can be read: where the other one has some, these go on.
                unreadable = unreadable or error
                passed_over.append(error.message.removeprefix("list ").removeprefix(self._path + os.sep))
                continue
            found += [self._info(c, of) for c in complete if c["attempt"]]
            passed_over += why
            passed_over += [f"{c['name']}: no commit record is there of the save that its {_names.METADATA} is of, so that nothing "
                            "proves a copy" for c in complete if not c["attempt"]]  # fmt: skip
        if unreadable is not None and not found:
            raise unreadable
        return sorted(found, key=age_of), passed_over

    def _plain(self) -> tuple[list[dict[str, Any]], list[str]]:
        """As `_native.list_checkpoints`. A look at all files of a checkpoint is repeated once an entry of its directory has changed: a listing
        of hundreds stays cheap."""
        passed_over: list[str] = []

        def recorded() -> list[dict[str, Any]]:
            found, passed_over[:] = _native.list_recorded(self._path)
            return found

        complete, also_passed_over, unreadable = _dcp_directories.listed_anew(recorded, self._look_at)
        if unreadable is not None and not complete:
            raise unreadable
        return complete, passed_over + also_passed_over

    def _look_at(self, recorded: list[dict[str, Any]]) -> tuple[_dcp_directories.Looks, bool]:
        """As `_plain`; and whether one is gone."""
        complete: list[dict[str, Any]] = []
        passed_over: list[str] = []
        whole: dict[str, object] = {}
        unreadable: Error | None = None
        is_gone = False
        for found in recorded:
            path = found["path"]
            try:
                with of_system(f"list {path}"):
                    status = os.stat(path, follow_symlinks=False)
                stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                complete.append(found if self._whole.get(path) == stamp else _native.inspect(path))
                whole[path] = stamp
            except Error as error:
                if error.code == "RESOURCE_EXHAUSTED":
                    raise
                if not os.path.lexists(path):
                    is_gone = True
                    continue
                if error.errno:
                    unreadable = unreadable or error
                passed_over.append(f"{found['name']}: {error.message.removeprefix(f'{path}: ')}")
        self._whole = whole
        return (complete, passed_over, unreadable), is_gone

    def _info(self, listed: dict[str, Any], format: str) -> Info:
        name = listed["name"]
        record = _names.dcp_record(listed["attempt"]) if format == "dcp" else _names.RECORD
        if format != "dcp" and not os.path.exists(os.path.join(self._path, name, record)):
            record = ""
        return Info(name, name, format, listed["step"], listed["saved_at"], listed["attempt"], listed["parent"] or "",
                    listed["world_size"], listed["bytes"], record)  # fmt: skip
