"""A directory of a mounted file system as a place: checkpoints there are ordinary ones, for every reader."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from holdfast import _dcp_directories, _durable, _names, _native, _regular
from holdfast.drain import direct_io, judging, slots
from holdfast.drain.beside import can_be_sent, recorded
from holdfast.drain.contents import files_of, manifest_name, parse, proven
from holdfast.drain.listing import Listing
from holdfast.drain.places import BESIDE, File, Info, Read, Seen, mount_of, pieces
from holdfast.errors import Error, of_system

PIECE_BYTES = 4 << 20
_AT_ONCE = 4  # pieces of one file


class Directory:
    """A directory. A checkpoint arrives in ``NAME.partial-<attempt>`` and gets its name by a rename.

    Args:
        seen: of a place of a drain: the directory is looked for and made on no other file system, and made once.
    """

    proves_arrival = False
    copies_at_once = True

    def __init__(self, path: str, seen: Seen | None = None) -> None:
        self.url = path
        self._path = os.path.abspath(path)
        self.seen = seen
        self.is_gone = False
        self._begun: set[str] = set()  # slots of copies that are not complete
        self._locks: dict[str, int] = {}
        self._present: dict[str, _durable.Presence] = {}  # in the slots of copies
        self._put: dict[str, set[str]] = {}  # files of drains beside the checkpoint of a slot into which files come late
        self._listing = Listing(self._path)
        self._digests: dict[str, dict[str, tuple[object, tuple[str, ...]]]] = {}  # of files that no manifest names, by slot, with their status

    def path(self, slot: str) -> str:
        return os.path.join(self._path, slot)

    def _file(self, slot: str, name: str) -> str:
        return os.path.join(self._path, slot, name.removeprefix(BESIDE))

    def _is_there(self) -> bool:
        """Whether the directory is there.

        Raises:
            Error: UNAVAILABLE where it is gone, or its file system is: copies would lie on another one, perhaps beside the originals,
                and count as arrived, and a source would count as empty. Else as `_exists`.
        """
        there, self.is_gone = _exists(self._path), False
        if self.seen is None:
            return there
        mount = mount_of(self._path)
        assert mount is not None
        if mount != self.seen.mount:
            if not mount.startswith(self.seen.mount.rstrip("/") + "/"):
                raise Error("UNAVAILABLE", f"open {self._path}: the file system that was mounted at {self.seen.mount} is no longer mounted; "
                            "mount it again")  # fmt: skip
            self.seen = Seen(mount)  # mounted later, as where the mount was missing at first
        self.is_gone = self.seen.was_there and not there
        if self.is_gone:
            raise Error("UNAVAILABLE", f"open {self._path}: the directory is gone; bring it back, or make an empty one to go on without what "
                        "it had")  # fmt: skip
        self.seen = Seen(mount, there)
        return there

    # ---- Reading.

    def complete(self, format: str = "") -> tuple[list[Info], list[str]]:
        if not self._is_there():
            return [], []
        try:
            complete, passed_over = self._listing.complete(format)
            there = {info.slot for info in complete}
            self._digests = {slot: digests for slot, digests in self._digests.items() if slot in there}
            return complete, passed_over
        finally:  # what was listed, or why not, is of another file system where this one was unmounted meanwhile
            self._is_there()

    def signature(self, slot: str = "") -> object:
        if slot:
            of_files: list[tuple[str, os.stat_result]] = []
            with contextlib.suppress(OSError):  # nothing, or no directory, or one that may not be read
                of_files.append(("", os.lstat(self.path(slot))))
                with os.scandir(self.path(slot)) as entries:
                    of_files += [(e.name, e.stat(follow_symlinks=False)) for e in entries]
            return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in of_files)
        # A commit is a rename: of the directory, or of DCP's last file in it.
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            return frozenset((e.name, e.stat().st_mtime_ns, e.inode()) for e in entries if e.is_dir())
        return None

    @contextlib.contextmanager
    def opened(self, slot: str, name: str) -> Iterator[Read]:
        path = self._file(slot, name)
        with of_system(f"open {path}"):
            fd = self._open_to_read(slot, path, os.O_NOFOLLOW)

        def read(begin: int, end: int) -> bytes:
            with of_system(f"read {path} @ {begin}"):
                data = os.pread(fd, end - begin, begin)
                while len(data) < end - begin and (more := os.pread(fd, end - begin - len(data), begin + len(data))):
                    data += more
                # The training's own files keep the page cache.
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            return data

        with _closed(fd, path):
            yield read

    def _open_to_read(self, slot: str, path: str, flags: int) -> int:
        folder = self._locks.get(slot)  # a directory may lose its name while it is written
        if folder is None:
            return _regular.open_to_read(path, "open", flags)
        return _regular.open_to_read(os.path.basename(path), f"open in {self.path(slot)}:", flags, folder=folder)

    def read(self, slot: str, name: str, bytes_max: int) -> bytes:
        path = os.path.join(self._path, slot, name)
        with of_system(f"read {path}"):
            return _regular.read_whole(path, "read", bytes_max)[0]

    def sizes(self, slot: str) -> dict[str, int]:
        path = self.path(slot)
        try:
            with of_system(f"list {path}"), os.scandir(path) as entries:
                return {e.name: e.stat().st_size for e in entries if e.is_file(follow_symlinks=False)}
        except Error as error:
            if error.code != "NOT_FOUND":
                raise
            return {}

    def beside(self, info: Info, names: Callable[[], set[str]], pace: Callable[[int], None]) -> tuple[list[File], list[str]]:
        path = self.path(info.slot)
        with of_system(f"list {path}"), os.scandir(path) as entries:
            others = {e.name: e for e in entries if not _names.is_reserved(e.name)}
        own = names()
        if any(map(slots.may_be_of_save, others.keys() - own)):  # of other attempts, or of Hugging Face
            own |= others.keys() - judging.foreign_in(self, info.slot, info.format)
        files, left = [], []
        try:
            has = {f.name.removeprefix(BESIDE): f for f in recorded(self, info)}
        except Error as error:
            if error.code != "DATA_LOSS":
                raise
            return [], sorted(others.keys() - own)  # nothing proves them
        for name in sorted({*others, *has} - own):
            try:
                if name in has and not self._is_changed(info.slot, name):
                    files.append(has[name])
                elif others[name].is_file(follow_symlinks=False) and can_be_sent(name):
                    files.append(self._digested(info.slot, name, pace))
                else:
                    left.append(name)
            except Error as error:
                if error.code == "CANCELLED":
                    raise
                if error.code != "NOT_FOUND":  # a file of a user's own that cannot be read holds no checkpoint up
                    left.append(name)
        return files, left

    def _is_changed(self, slot: str, name: str) -> bool:
        """Whether somebody has written a file since a drain has recorded it. One that is missing is not changed: it is sent as it was, or not."""
        try:  # not by the time of its bytes, which a copy may take along
            return os.lstat(self._file(slot, name)).st_ctime_ns > os.stat(self._file(slot, _names.BESIDE_RECORD)).st_ctime_ns
        except OSError:
            return False

    def _is_anew(self, slot: str, file: File) -> bool:
        """Whether a recorded file has other bytes by now. One whose owner or mode was changed alone has not."""
        if not self._is_changed(slot, file.name):
            return False
        try:
            with self.opened(slot, file.name) as read:
                have = proven(read, file, file.name)
                for begin, end in pieces(file, PIECE_BYTES):
                    have(begin, end)
                return bool(read(file.bytes, file.bytes + 1))
        except Error:
            return True

    def _refuse_anew(self, slot: str, files: list[File], path: str) -> None:
        for file in files:
            if self._is_anew(slot, file):
                raise Error("FAILED_PRECONDITION", f"remove {path}: {file.name.removeprefix(BESIDE)} has been written anew since it was "
                            "recorded; move it elsewhere")  # fmt: skip

    def _digested(self, slot: str, name: str, pace: Callable[[int], None]) -> File:
        """A file that has no digests yet. One that changes meanwhile is found when it is sent."""
        path = self._file(slot, name)
        with of_system(f"open {path}"):
            status = os.stat(path, follow_symlinks=False)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        of_slot = self._digests.setdefault(slot, {})
        known = of_slot.get(name)
        if known is None or known[0] != stamp:
            digests = []
            with self.opened(slot, name) as read:
                for begin in range(0, status.st_size, _native.CHUNK_BYTES):
                    pace(min(_native.CHUNK_BYTES, status.st_size - begin))
                    digests.append(_regular.digest(read(begin, min(begin + _native.CHUNK_BYTES, status.st_size))))
            known = of_slot[name] = stamp, tuple(digests)
        return File(BESIDE + name, status.st_size, _native.CHUNK_BYTES, known[1])

    # ---- Writing.

    def begin(self, info: Info, files: Iterable[str] = ()) -> str:
        slot = _names.partial(info.name, info.attempt)
        path = self.path(slot)
        if not self._is_there():
            _durable.make_directory(self._path)
            self.seen = self.seen and self.seen._replace(was_there=True)
        with slots.of_copy(path):
            with slots.of_name(path, ()), of_system(f"make directory {path}"), contextlib.suppress(FileExistsError):
                os.mkdir(path)
            self._begun.add(slot)
            with slots.of_name(path):
                self._take(slot)
        return slot

    def _take(self, slot: str) -> None:
        path = self.path(slot)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:  # before the lock: with that alone a recovery takes the drain for a worker without a trainer
            present = _durable.Presence(path)
        except OSError:
            os.close(fd)
            raise
        is_mine = _durable.locked(fd, fcntl.LOCK_SH)  # a recovery and a clean-up leave the directory alone
        self._end(slot)
        self._locks[slot], self._present[slot] = fd, present
        if not is_mine:
            self._end(slot)
            raise _removed_meanwhile(path)
        slots.touch(slots.MARK, fd)

    def _end(self, slot: str) -> None:
        fd = self._locks.pop(slot, None)
        if fd is not None:
            os.close(fd)
        if present := self._present.pop(slot, None):
            present.clear()

    def let_go(self) -> None:
        for slot in list(self._locks):
            self._end(slot)

    @contextlib.contextmanager
    def late(self, info: Info) -> Iterator[Callable[[], None]]:
        path = self.path(info.slot)
        try:
            with of_system(f"write {path}"):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except Error as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise Error("ABORTED", f"write {path}: another process has replaced or removed it") from error
            raise
        self._locks[info.slot] = fd
        try:
            if not _durable.locked(fd, fcntl.LOCK_SH):
                raise Error("ABORTED", f"write {path}: another process removes it")
            self._check_same(info, fd)
            self._put[info.slot] = set(judging.recorded_in(self, info))
            yield lambda: self._check_same(info, fd)
        finally:
            self._put.pop(info.slot, None)
            self._end(info.slot)

    def write(self, slot: str, file: File, read: Read, is_resumed: bool) -> None:
        # A list gets its name when it is whole: a recovery keeps a directory with a damaged one. So does a file that comes late.
        path, folder = self._file(slot, file.name), self._locks[slot]
        slots.check_at(self.path(slot), folder)
        name = final = os.path.basename(path)
        is_beside = file.name.startswith((BESIDE, _names.BESIDE_RECORD))
        if is_beside:
            name = _names.unfinished_beside(final)
            self._refuse_foreign(slot, final, folder)
        elif slots.is_list(final):
            name += _names.UNFINISHED
        with slots.of_copy(path):
            try:
                self._fill(slot, name, file, read, is_resumed)
            except Error as error:
                if name != final and error.code == "DATA_LOSS":  # of the source: nothing of it is of use
                    self.discard(slot, name)
                raise
            if is_beside and file.name != _names.BESIDE_RECORD:
                # An empty file says of a file that a drain has put it there, until the record does.
                slots.touch(_names.unfinished_beside(file.name), folder)
            if name != final:
                with slots.of_name(path):
                    os.rename(name, final, src_dir_fd=folder, dst_dir_fd=folder)
            if is_beside:
                os.fsync(folder)
                for recorded_now in files_of(parse(file.content or b"", path), path) if file.name == _names.BESIDE_RECORD else ():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(_names.unfinished_beside(BESIDE + recorded_now.name), dir_fd=folder)

    def _fill(self, slot: str, name: str, file: File, read: Read, is_resumed: bool) -> None:
        """Writes a file durably under a name. What an earlier try has left is read first, where that is durable."""
        path = self._file(slot, file.name)
        with slots.of_name(path):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=self._locks[slot])
        with self._lasting(slot, name, path, fd):
            there = os.fstat(fd).st_size if is_resumed else 0
            if there:
                _sync(fd)
            os.ftruncate(fd, file.bytes)
            have = proven(lambda begin, end: os.pread(fd, end - begin, begin), file._replace(content=None), path)

            def send(piece: tuple[int, int]) -> None:
                begin, end = piece
                if begin < there and _is_right(have, begin, end):
                    return
                write(memoryview(read(begin, end)), begin)

            with direct_io.writing(fd) as write:
                each(send, pieces(file, PIECE_BYTES))
            _sync(fd)

    @contextlib.contextmanager
    def _lasting(self, slot: str, name: str, path: str, fd: int) -> Iterator[None]:
        """Closes a file of a copy. Where the system refuses something of it, the file goes: of a page that could not be written the system
        tells once, and the cache gives it back as if it were on the disk."""
        with of_system(f"write {path}"):
            try:
                try:
                    yield
                finally:
                    os.close(fd)
            except Error:  # of the source
                raise
            except OSError:
                self.discard(slot, name)
                raise

    def settle(self, slot: str = "", name: str = "") -> None:
        path = os.path.normpath(self._file(slot, name))
        with slots.of_copy(path):
            if not name:
                _durable.sync_directory(path)
                return
            fd = self._open_to_read(slot, path, os.O_NOFOLLOW)
            with self._lasting(slot, name, path, fd):
                _sync(fd)

    def discard(self, slot: str, name: str) -> None:
        with contextlib.suppress(OSError):
            if slots.is_at(self.path(slot), self._locks[slot]):  # else another process has made a checkpoint of it
                os.unlink(os.path.basename(self._file(slot, name)), dir_fd=self._locks[slot])

    def _refuse_foreign(self, slot: str, name: str, folder: int) -> None:
        """Beside a complete checkpoint a user may have put a file of the same name."""
        if slot in self._put and name not in {*self._put[slot], *slots.unrecorded(_durable.names_in(folder)), _names.BESIDE_RECORD}:
            with contextlib.suppress(FileNotFoundError):
                os.stat(name, dir_fd=folder, follow_symlinks=False)
                raise Error("FAILED_PRECONDITION", f"write {self.path(slot)}/{name}: a file that no drain has put there has the name; move it away")

    @contextlib.contextmanager
    def opened_past_cache(self, slot: str, name: str) -> Iterator[Read]:
        """As `opened`, from the disk where the file system can read directly. What a read returns may be a view."""
        path = self._file(slot, name)
        try:
            fd = self._open_to_read(slot, path, os.O_DIRECT | os.O_NOFOLLOW)
        except OSError:
            with self.opened(slot, name) as read:
                yield read
            return
        with _closed(fd, path):
            yield direct_io.reading(fd, path)

    def commit(self, slot: str, info: Info, last: File, files: set[str]) -> None:
        path, final = self.path(slot), self.path(info.name)
        assert last.content is not None
        content = last.content
        self.write(slot, last, lambda begin, end: content[begin:end], False)
        with slots.of_copy(path), of_system(f"complete {final}"):
            folder = self._locks[slot]
            with slots.of_name(path):
                for name in _durable.names_in(folder):
                    if name not in files and BESIDE + name not in files:
                        os.unlink(name, dir_fd=folder)
            os.fsync(folder)
            replaced = ""
            if os.path.lexists(final):
                with slots.of_name(final):
                    replaced = self._replace(slot, info, files)
            else:
                os.rename(path, final)
                _durable.sync_directory(self._path)
        self._end(slot)
        self._begun.discard(slot)
        if replaced:
            slots.remove_unnamed(replaced)

    def remove_replaced(self, info: Info) -> None:
        pass  # there is one directory of a name

    def _replace(self, slot: str, info: Info, new: set[str]) -> str:
        """Gives a copy the name of another directory, whose path it returns.

        Raises:
            Error: ABORTED where that was not the directory that was judged, which then has its name again; as `_replaceable`.
        """
        path, final, aside = self.path(slot), self.path(info.name), self.path(_names.aside(slot))
        with slots.of_name(final, (*slots.OF_A_SLOT, errno.EIO)):
            old, before = judging.replaceable(self, info, new)
        replaced = _durable.replace_directory(path, final, aside)
        if slots.stamp(replaced) != before:
            _durable.replace_directory(replaced, final, aside if replaced == path else path)
            raise Error("ABORTED", f"replace {final}: another process has replaced or changed it meanwhile")
        _durable.sync_directory(self._path)
        if old:
            # Not before its successor stands: a recovery removes a retired directory without a look at the name.
            with contextlib.suppress(OSError):  # the name is too long, or another process has retired this attempt
                retired = self.path(_names.retired(info.name, old.attempt))
                os.rename(replaced, retired)
                replaced = retired
        return replaced

    def may_take(self, info: Info, new: Callable[[], set[str]]) -> bool:
        """Whether a checkpoint may get its name here: nothing has it, or something that the checkpoint would replace.

        Args:
            new: returns the names of its files.
        """
        try:
            if os.path.lexists(self.path(info.name)):
                judging.replaceable(self, info, new())
            return True
        except Error as error:
            if error.code not in ("FAILED_PRECONDITION", "ABORTED"):
                raise
            return False

    def remove(self, info: Info) -> None:
        path = self.path(info.slot)
        with of_system(f"remove {path}"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not _durable.locked(fd, fcntl.LOCK_EX):
                raise Error("ABORTED", f"remove {path}: it is being loaded")
            try:
                beside = judging.recorded_in(self, info)
            except Error as error:
                if error.code != "DATA_LOSS":
                    raise
                raise Error("FAILED_PRECONDITION", f"remove {path}: {error.message}; remove the directory yourself") from error
            if beside:
                self._retire(info, fd, set(beside))
            elif info.format == "dcp":
                _dcp_directories.remove(info.listed(self))
            else:
                try:
                    _native.remove_checkpoint(path, info.attempt)
                except Error as error:  # its message may name the checkpoint alone, and a drain has two places
                    if self._path in error.message:
                        raise
                    raise Error(error.code, f"remove {path}: {error.message}", error.errno) from None
        finally:
            os.close(fd)
        if beside:
            slots.remove_unnamed(self.path(_names.retired(info.name, info.attempt)))

    def _retire(self, info: Info, fd: int, beside: set[str]) -> None:
        """Takes a checkpoint's name away, before the first of its files goes: a checkpoint that keeps its name keeps the files beside it, too."""
        path, retired = self.path(info.slot), self.path(_names.retired(info.name, info.attempt))
        with of_system(f"remove {path}"):
            self._check_removable(info, fd, beside)
            unrecorded = slots.unrecorded(_durable.names_in(fd))
            files = [f for f in recorded(self, info) if f.name.removeprefix(BESIDE) not in unrecorded]
            self._refuse_anew(info.slot, files, path)
            slots.remove_unnamed(retired)  # of an earlier removal of a copy
            os.rename(path, retired)
            try:
                if not slots.is_at(retired, fd):
                    raise Error("ABORTED", f"remove {path}: another process has replaced it")
                self._refuse_anew(os.path.basename(retired), files, path)  # nobody finds them by their path any more
            except Error:
                os.rename(retired, path)
                raise
            _durable.sync_directory(self._path)

    def _check_removable(self, info: Info, fd: int, beside: set[str]) -> None:
        path = self.path(info.slot)
        self._check_same(info, fd)
        if _native.saves_at_work(path) in ("trainer", "orphan"):
            raise Error("ABORTED", f"remove {path}: a save is on its way there")
        if foreign := judging.foreign_in(self, info.slot, info.format) - beside:
            raise Error("FAILED_PRECONDITION", f"remove {path}: {min(foreign)} is no file of the checkpoint; move it elsewhere")

    def _check_same(self, info: Info, fd: int) -> None:
        """Refuses, with ABORTED, where an open directory is no longer that of a checkpoint."""
        path, name = self.path(info.slot), info.record or manifest_name(info, 0)
        try:
            with of_system(f"open {path}"):
                attempt = parse(self.read(info.slot, name, _regular.MANIFEST_BYTES_MAX), f"{path}/{name}").get("attempt")
                is_same = attempt == info.attempt and slots.is_at(path, fd)
        except Error as error:
            if error.code != "NOT_FOUND":
                raise
            is_same = False
        if not is_same:
            raise Error("ABORTED", f"open {path}: another process has replaced or removed it")

    def clean(self, keep: set[str]) -> list[str]:
        # What a complete checkpoint has replaced, and what this process has begun for a checkpoint that is gone. The rest is for
        # `holdfast recover`, which asks for a save's marks.
        complete = {info.name: info for info in self.complete()[0]}
        replaced = []
        with of_system(f"list {self._path}"):
            entries = sorted(os.listdir(self._path)) if complete else []  # else the place may be anything
        for slot in entries:
            match = _names.UNCOMMITTED.fullmatch(slot)
            if match and match["kind"] != "fenced" and judging.is_over(self, slot, complete.get(match["name"])):
                replaced.append(slot)
        given_up = [slot for slot in self._begun if slot.rpartition("-")[2] not in keep]
        self._begun.difference_update(given_up)
        removed = []
        for slot in (*replaced, *given_up):
            self._end(slot)
            if slots.remove_unnamed(self.path(slot)):
                removed.append(slot)
        return removed


def _removed_meanwhile(path: str) -> Error:
    return Error("UNAVAILABLE", f"write {path}: another process removes it")


def _exists(path: str) -> bool:
    """Whether a directory is there. One that cannot be looked at is not taken for a missing one: a run would begin anew.

    Raises:
        Error: of the system; NOT_FOUND where a link on the way leads nowhere, as to a file system that is not mounted.
    """
    with of_system(f"list {path}"):
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)
            return True
    above = path
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.exists(above):
        raise Error("NOT_FOUND", f"list {path}: {above} is a link to {os.readlink(above)}, which is not there; mount or make it")
    return False


@contextlib.contextmanager
def _closed(fd: int, path: str) -> Iterator[None]:
    """Closes a file that was read; FUSE tells then what it could not write before."""
    try:
        yield
    finally:
        with of_system(f"read {path}"):
            os.close(fd)


def _sync(fd: int) -> None:
    """Makes a file durable, and lets it be read from the disk."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_right(have: Read, begin: int, end: int) -> bool:
    try:
        have(begin, end)
    except (Error, OSError):
        return False
    return True


def each(work: Callable[[tuple[int, int]], None], items: Iterable[tuple[int, int]]) -> None:
    """Calls `work` with each item, several at once; raises the first error once all calls have ended."""
    with ThreadPoolExecutor(_AT_ONCE, "holdfast-drain") as pool:
        futures = []
        for item in items:
            futures.append(pool.submit(work, item))
            if len(futures) >= 2 * _AT_ONCE:  # stop early, and keep no list of a million
                futures.pop(0).result()
        for future in futures:
            future.result()
