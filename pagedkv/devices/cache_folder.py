"""The user's cache folder: files that can be made again, and are used only after a check.

    $XDG_CACHE_HOME/pagedkv, else ~/.cache/pagedkv
        cpu/     shared libraries          cuda/    machine code
        model/   converted weights         zig/     the C library of zig, which zig fills itself
    a file = content + seal; the seal is one line with the SHA-256 of the file's name and content

A file of another user would run as ours (a library) or would answer for ours (weights), and a truncated library kills
the process with SIGBUS.  So:

- Our folders are made with mode 0700, belong to the effective user, are no symbolic links, and nobody else can write
  them or rename a folder above them.  An unsafe folder is refused, never repaired.  `dlopen` takes a path; in a safe
  folder only the user himself can replace the file between the check and the use.
- A file is opened without following links and without waiting (a pipe), and compared with its seal.  A damaged one is
  made again, once, with a line on stderr; if it is damaged again, the error says what to delete.
- A new file is written in a scratch folder beside it, synchronized to the disk and renamed.  A killed build leaves its
  scratch folder; the next build that comes a day later deletes it.
- Without a home folder, or where the folder cannot be written, the process works in a temporary folder of its own, with
  a line on stderr.  The files that are there are still used.

The check costs a pass of SHA-256: 0.2 ms for a library, 4 ms for 20 kernels at a start, 0.4 s for weights of 540 MB
(1.3 GiB/s, measured); once per process and file.
"""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import os
import pwd
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pagedkv.errors import MissingRequirement

Announce = Callable[[str], None]

SEAL_HEAD = b"\npagedkv seal 1 "
SEAL_BYTES = len(SEAL_HEAD) + 2 * hashlib.sha256().digest_size + 1
SCRATCH_PREFIX = ".build-"
SCRATCH_SECONDS_MAX = 86_400.0  # no build runs for a day

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT_WRITE = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT))
_PIECE_BYTES = 1 << 20

_ABSENT, _WHOLE = "absent", "whole"


def announce_on_stderr(line: str) -> None:
    """Say one line on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class CacheFolder:
    """One folder of files that can be made again: a `kind` such as "cpu", below the user's cache folder.

    Nothing is read or made before the first call.

    Args:
        kind: name of the folder.
        base: the folder above it; by default the user's cache folder.
        announce: called with one line when a file is damaged or the folder cannot be used.
    """

    def __init__(self, kind: str, *, base: Path | None = None, announce: Announce = announce_on_stderr) -> None:
        self._kind = kind
        self._base = base
        self._announce = announce

    @property
    def path(self) -> Path:
        """The folder, which need not exist.

        Raises:
            MissingRequirement: the user has no home folder, and XDG_CACHE_HOME names none.
        """
        if self._base is not None:
            return self._base / self._kind
        above = _user_cache_home()
        if above is None:
            raise MissingRequirement(
                "the cache folder", expected="a home folder, or a cache folder in XDG_CACHE_HOME",
                got=f"no absolute path in $HOME, $XDG_CACHE_HOME and the password entry of user {os.geteuid()}",
                remedy="set XDG_CACHE_HOME to a writable folder", clause="C12.4",
            )
        return above / "pagedkv" / self._kind

    def check(self) -> None:
        """Make the folder if it is absent, and refuse one that cannot be used.

        Raises:
            MissingRequirement: others can write the folder or rename it, or it cannot be made or written.
        """
        try:
            with self._opened() as place, _refusing(place.path):
                place.make_scratch()[1]()
        except _CannotWrite as reason:
            raise reason.refusal from reason

    def writable_path(self) -> Path:
        """Return the folder for a tool that manages its files itself, or one of this process where it is not writable.

        Raises:
            MissingRequirement: as `file`.
        """
        try:
            with self._opened() as place, _refusing(place.path):
                place.make_scratch()[1]()
                return place.path
        except _CannotWrite as reason:
            return self._temporary(reason).writable_path()

    def file(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the path of a checked file; make the file if it is absent or damaged.

        Processes that make it at the same time end with one whole file.  The caller reads `content_of(path)`, or
        ignores the last SEAL_BYTES bytes.

        Args:
            name: the file's name, which stands for its content: another content has another name.
            make: writes the content to the path that it gets; other files beside that path are deleted.
        Raises:
            MissingRequirement: the folder is unsafe or cannot be used, no space is left, or the file is damaged again.
        """
        try:
            return self._file(name, make)
        except _CannotWrite as reason:
            return self._temporary(reason).file(name, make)

    def _file(self, name: str, make: Callable[[Path], None]) -> Path:
        with self._opened() as place:
            path = place.path / name
            state = place.state(name)
            if state == _WHOLE:
                return path
            if state != _ABSENT:
                self._announce(f"pagedkv: {path} is damaged ({state}); it is made again, once")
            with _refusing(place.path):
                scratch, remove = place.make_scratch()
            try:
                with _refusing(place.path, only=_NO_SPACE):
                    make(place.path / scratch / "content")
                with _refusing(place.path, again=path):
                    place.seal(f"{scratch}/content", name)
            finally:
                remove()
            state = place.state(name)
            if state != _WHOLE:
                raise _damaged_again(path, state)
            return path

    def _temporary(self, reason: _CannotWrite) -> CacheFolder:
        """Return the folder of this process that stands in, and say so once."""
        if self._base is not None and self._base == _Temporary.base:
            raise reason.refusal from reason
        with _Temporary.lock:
            if _Temporary.base is None or _Temporary.process != os.getpid():
                try:
                    _Temporary.base = Path(tempfile.mkdtemp(prefix="pagedkv-"))
                except OSError:  # no folder for temporary files either
                    raise reason.refusal from reason
                _Temporary.process = os.getpid()
                _Temporary.said = set()
                atexit.register(_remove_temporary, _Temporary.base, _Temporary.process)
            if self._kind not in _Temporary.said:
                _Temporary.said.add(self._kind)
                self._announce(
                    f"pagedkv: {reason.refusal.got}; this process builds in {_Temporary.base} and deletes it at its "
                    f"end; {reason.refusal.remedy}"
                )
            return CacheFolder(self._kind, base=_Temporary.base, announce=self._announce)

    @contextmanager
    def _opened(self) -> Iterator[_Place]:
        """Open the folder, made if it is absent, and check every folder that it depends on."""
        try:
            path = self.path
        except MissingRequirement as refusal:
            raise _CannotWrite(refusal) from refusal
        own = 2 if self._base is None else 1  # the last parts of the path that are ours alone
        above, names = Path(*path.parts[:-own]), path.parts[-own:]
        with ExitStack() as opened:  # closes each folder once, whatever line is interrupted
            with _refusing(above):
                for folder in reversed((above, *above.parents)):
                    if not folder.exists():
                        with suppress(FileExistsError):
                            folder.mkdir(0o700)
                above = Path(os.path.realpath(above, strict=True))
                opened.callback(os.close, descriptor := os.open(above, _OPEN_FOLDER))
            _check_parents(above)
            for name in names:
                above /= name
                with _refusing(above):
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=descriptor)
                    opened.callback(os.close, descriptor := _open_own(name, descriptor, above))
                status = os.fstat(descriptor)
                if status.st_uid != os.geteuid():
                    raise _unsafe(above, f"owner {status.st_uid}", "delete it")
                if status.st_mode & _OTHERS_WRITE:
                    raise _unsafe(above, f"mode {stat.S_IMODE(status.st_mode):04o}", _remedy_of_mode(above))
            yield _Place(above, descriptor)


def content_of(path: Path) -> bytes:
    """Return the content of a file of `CacheFolder.file`, without its seal."""
    return path.read_bytes()[:-SEAL_BYTES]


class _CannotWrite(Exception):
    """The folder cannot be written or there is none: `refusal` is what the caller would hear."""

    def __init__(self, refusal: MissingRequirement) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class _Temporary:
    """The temporary folder of this process: written under `lock`; a fork makes its own."""

    lock = threading.Lock()
    base: Path | None = None
    process = 0
    said: set[str] = set()  # noqa: RUF012  # kinds whose line was announced


def _remove_temporary(base: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(base, ignore_errors=True)


@dataclass(frozen=True)
class _Place:
    """A safe folder, open."""

    path: Path
    descriptor: int

    def state(self, name: str) -> str:
        """Return `absent`, `whole`, or what is wrong with the file."""
        try:
            # Without O_NONBLOCK the open of a named pipe would wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        except FileNotFoundError:
            return _ABSENT
        except OSError as error:
            return "a symbolic link" if error.errno == errno.ELOOP else f"it cannot be opened: {error.strerror}"
        try:
            return self._state(name, descriptor)
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        finally:
            os.close(descriptor)

    def _state(self, name: str, descriptor: int) -> str:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "not a file"
        if status.st_uid != os.geteuid():
            return f"owner {status.st_uid}, not {os.geteuid()}"
        if status.st_mode & _OTHERS_WRITE:
            return f"others can write it: mode {stat.S_IMODE(status.st_mode):04o}"
        if status.st_size < SEAL_BYTES:
            return f"{status.st_size} bytes, too few for a seal"
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        key = (str(self.path), name)
        if _checked.get(key) == identity:
            return _WHOLE
        expected = _seal(name, descriptor, status.st_size - SEAL_BYTES)
        if os.pread(descriptor, SEAL_BYTES, status.st_size - SEAL_BYTES) != expected:
            return "its content differs from its seal"
        _checked[key] = identity
        return _WHOLE

    def make_scratch(self) -> tuple[str, Callable[[], None]]:
        """Make a scratch folder; return its name and the function that deletes it.  Old ones of killed builds go."""
        for entry in os.listdir(self.descriptor):
            if entry.startswith(SCRATCH_PREFIX):
                with suppress(OSError):  # another process deletes it too
                    status = os.stat(entry, dir_fd=self.descriptor, follow_symlinks=False)
                    if time.time() - status.st_mtime > SCRATCH_SECONDS_MAX:
                        self._remove(entry)
        name = f"{SCRATCH_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return name, functools.partial(self._remove, name)

    def _remove(self, name: str) -> None:
        shutil.rmtree(name, dir_fd=self.descriptor, ignore_errors=True)

    def seal(self, source: str, name: str) -> None:
        """Append the seal to a new file, bring it to the disk, and give it its name."""
        descriptor = os.open(source, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            os.fchmod(descriptor, 0o600)
            size = os.fstat(descriptor).st_size
            seal = _seal(name, descriptor, size)
            if os.pwrite(descriptor, seal, size) != len(seal):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(source, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        with suppress(OSError):  # some network file systems cannot synchronize a folder
            os.fsync(self.descriptor)


_checked: dict[tuple[str, str], tuple[int, ...]] = {}
"""Files that this process found whole, by folder and name: device, inode, size and times of that moment."""


def _seal(name: str, descriptor: int, size: int) -> bytes:
    """Return the seal of the first `size` bytes of an open file.

    The name is part of it: another module's file under this name is no match.
    """
    digest = hashlib.sha256(name.encode() + b"\0")
    at = 0
    while at < size and (piece := os.pread(descriptor, min(_PIECE_BYTES, size - at), at)):
        digest.update(piece)
        at += len(piece)
    return SEAL_HEAD + digest.hexdigest().encode() + b"\n"


def _user_cache_home() -> Path | None:
    """Return $XDG_CACHE_HOME, else ~/.cache; None without a home folder.

    A relative path is ignored, as the XDG specification says: the folder would change with the working folder.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named and os.path.isabs(named):
        return Path(named)
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            return None
    return Path(home) / ".cache" if os.path.isabs(home) else None


def _open_own(name: str, above: int, path: Path) -> int:
    try:
        return os.open(name, _OPEN_FOLDER, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        kind = "a symbolic link" if path.is_symlink() else "not a folder"
        raise _unsafe(path, kind, "delete it") from error


def _check_parents(folder: Path) -> None:
    """Refuse a folder that another user could rename away, with all that is in it.  `folder` has no symbolic link.

    The owner of / owns the machine: that is root, or in a container whom root is mapped to.
    """
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for path in (folder, *folder.parents):
        status = os.stat(path)
        if status.st_uid not in trusted:
            raise _unsafe(path, f"owner {status.st_uid}", "take another folder")
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise _unsafe(path, f"mode {stat.S_IMODE(status.st_mode):04o}", _remedy_of_mode(path))


def _remedy_of_mode(path: Path) -> str:
    return f"if you trust its content, run `chmod go-w {path}`; otherwise delete it"


def _unsafe(path: Path, got: str, remedy: str) -> MissingRequirement:
    return MissingRequirement(
        f"the cache folder {path}",
        expected=f"a folder that only user {os.geteuid()} can write or replace: its files are loaded and run",
        got=got, remedy=f"{remedy}, or set XDG_CACHE_HOME to a folder of your own", clause="C12.4", folder=str(path),
    )


def _damaged_again(path: Path, state: str) -> MissingRequirement:
    return MissingRequirement(
        f"the cached file {path}", expected="a file that can be read back as it was written",
        got=f"a new file that is damaged again: {state}",
        remedy=f"delete {path} and check the disk, or set XDG_CACHE_HOME to a folder on another one", clause="C12.4",
        folder=str(path.parent),
    )


@contextmanager
def _refusing(folder: Path, *, only: frozenset[int] | None = None, again: Path | None = None) -> Iterator[None]:
    """Turn an error of the file system into a refusal that names the folder; `only` these errors, by default all.

    `again`: the file that is about to be replaced.  A folder in its place is not ours to delete.
    """
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        if again is not None and again.is_dir():
            raise _damaged_again(again, "a folder is in its place") from error
        got, remedy = f"{folder}: {error.strerror or error}", "set XDG_CACHE_HOME to a writable folder"
        if error.errno in _NO_SPACE:
            got, remedy = f"no space left in {folder}", "free some, or set XDG_CACHE_HOME to a folder with space"
        refusal = MissingRequirement(
            f"the cache folder {folder}", expected="a writable folder with space", got=got, remedy=remedy,
            clause="C12.4", folder=str(folder),
        )
        raise (_CannotWrite(refusal) if error.errno in _CANNOT_WRITE else refusal) from error
