"""Hostile states of a cache folder: damaged files, foreign files, and folders that are not the user's own.

`states()` yields each with what the library must do.  The state is planted around one whole file of the library, beside
a whole file of another content, in <base>/pagedkv/<kind>.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagedkv.devices.cache_folder import SCRATCH_PREFIX, SCRATCH_SECONDS_MAX, SEAL_BYTES

TRUNCATIONS, FLIPS = 64, 96
FOREIGN_USER = 65_534

Outcome = Literal["used", "made", "made again", "refused", "made, then refused"]
"""`made again` says so in one line; `made` is silent, since the file was absent; the others make and say nothing."""


@dataclass(frozen=True)
class Place:
    """The folder before the attack, and how a path is given to another user."""

    base: Path
    file: Path
    other: Path
    give_away: Callable[[Path], None]

    @property
    def folder(self) -> Path:
        return self.file.parent


@dataclass(frozen=True)
class State:
    """One attack, and its outcome."""

    name: str
    plant: Callable[[Place], object]
    outcome: Outcome


def states(size: int, seed: int) -> Iterator[State]:
    """Yield every state for a file of `size` bytes."""
    yield from _contents(size, random.Random(seed))
    yield from _files()
    yield from _folders()


def _contents(size: int, random: random.Random) -> Iterator[State]:
    lengths = {0, 1, 3, 4, 63, 64, SEAL_BYTES - 1, SEAL_BYTES, SEAL_BYTES + 1, size - SEAL_BYTES, size - 1}
    while len(lengths) < TRUNCATIONS:
        lengths.add(random.randrange(size))
    for length in sorted(lengths):
        yield State(f"truncated to {length}", _with(lambda p, n: os.truncate(p.file, n), length), "made again")
    offsets = {0, size - SEAL_BYTES - 1, size - SEAL_BYTES, size - 1}
    while len(offsets) < FLIPS:
        offsets.add(random.randrange(size))
    for offset in sorted(offsets):
        bit = 1 << random.randrange(8)
        yield State(f"bit {bit} of byte {offset}", _with(_flip, offset, bit), "made again")
    changes: dict[str, Callable[[bytes], bytes]] = {
        "a byte more": lambda b: b + b"\0", "twice": lambda b: b + b, "a line more": lambda b: b + b"\n",
        "no seal": lambda b: b[:-SEAL_BYTES], "a seal alone": lambda b: b[-SEAL_BYTES:],
        "two seals": lambda b: b + b[-SEAL_BYTES:], "zeros": lambda b: bytes(len(b)),
        "ones": lambda b: b"\xff" * len(b), "a hole": lambda b: b[:100] + bytes(300) + b[400:],
        "a seal of zeros": lambda b: b[:-65] + b"0" * 64 + b"\n",
        "a seal in capital letters": lambda b: b[:-65] + b[-65:].upper(),
        "halves exchanged": lambda b: b[len(b) // 2 :] + b[: len(b) // 2],
    }  # fmt: skip
    for name, change in changes.items():
        yield State(name, _with(lambda p, f: p.file.write_bytes(f(p.file.read_bytes())), change), "made again")
    yield State("another module's file", lambda p: p.file.write_bytes(p.other.read_bytes()), "made again")
    yield State("another module's seal", lambda p: p.file.write_bytes(
        p.file.read_bytes()[:-SEAL_BYTES] + p.other.read_bytes()[-SEAL_BYTES:]), "made again")


def _files() -> Iterator[State]:
    def instead(place: Callable[[Path], object]) -> Callable[[Place], object]:
        return lambda p: place(_unlinked(p.file))

    yield State("nothing", lambda p: None, "used")
    yield State("no file", lambda p: p.file.unlink(), "made")
    yield State("a link to a whole file", lambda p: p.file.symlink_to(p.file.rename(p.base / "aside")), "made again")
    yield State("a link to nothing", instead(lambda f: f.symlink_to("absent")), "made again")
    yield State("a link to itself", instead(lambda f: f.symlink_to(f.name)), "made again")
    yield State("a link to a device", instead(lambda f: f.symlink_to("/dev/zero")), "made again")
    yield State("a named pipe", instead(os.mkfifo), "made again")
    yield State("a socket", instead(_bind), "made again")
    yield State("an empty folder", instead(os.mkdir), "made, then refused")
    yield State("a folder with a file", instead(_fill), "made, then refused")
    yield State("another user's file", lambda p: p.give_away(p.file), "made again")
    yield State("a second name", lambda p: os.link(p.file, p.base / "aside"), "used")
    modes: tuple[tuple[int, Outcome], ...] = (
        (0o666, "made again"), (0o660, "made again"), (0o620, "made again"), (0o602, "made again"),
        (0o777, "made again"), (0o644, "used"), (0o400, "used"), (0o700, "used"),
    )  # fmt: skip
    for mode, outcome in modes:
        yield State(f"file mode {mode:o}", _with(lambda p, m: p.file.chmod(m), mode), outcome)
    yield State("a scratch folder of now", lambda p: (p.folder / f"{SCRATCH_PREFIX}1-a").mkdir(), "used")
    yield State("old scratch folders and no file", instead(_leave_scratch), "made")


def _folders() -> Iterator[State]:
    folders: dict[str, Callable[[Place], Path]] = {
        "kind": lambda p: p.folder, "pagedkv": lambda p: p.folder.parent, "base": lambda p: p.base,
        "above": lambda p: p.base.parent,
    }  # fmt: skip
    for which, path in folders.items():
        is_ours = which in ("kind", "pagedkv")
        modes: tuple[tuple[int, Outcome], ...] = (
            (0o777, "refused"), (0o770, "refused"), (0o775, "refused"), (0o757, "refused"), (0o702, "refused"),
            (0o755, "used"), (0o750, "used"), (0o700, "used"), (0o1700, "used"),
            (0o1777, "refused" if is_ours else "used"),
        )  # fmt: skip
        for mode, outcome in modes:
            yield State(f"{which} mode {mode:o}", _with(lambda p, f, m: f(p).chmod(m), path, mode), outcome)
        yield State(f"{which} of another user", _with(lambda p, f: p.give_away(f(p)), path), "refused")
        yield State(f"{which} behind a link", _with(lambda p, f: _link(f(p)), path), "refused" if is_ours else "used")
        if which != "above":
            yield State(f"a file instead of {which}", _with(lambda p, f: _move(f(p)).touch(), path), "refused")
            yield State(f"a pipe instead of {which}", _with(lambda p, f: os.mkfifo(_move(f(p))), path), "refused")
            yield State(f"no {which}", _with(lambda p, f: _move(f(p)), path), "made")
        yield State(f"{which} leads nowhere", _with(lambda p, f: _move(f(p)).symlink_to("absent"), path), "refused")


def _with(function: Callable[..., object], *arguments: Any) -> Callable[[Place], object]:
    return lambda place: function(place, *arguments)


def _flip(place: Place, offset: int, bit: int) -> None:
    content = bytearray(place.file.read_bytes())
    content[offset] ^= bit
    place.file.write_bytes(content)


def _bind(file: Path) -> None:
    here = Path.cwd()
    os.chdir(file.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(file.name)
    finally:
        os.chdir(here)


def _unlinked(file: Path) -> Path:
    file.unlink()
    return file


def _fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "x").touch()


def _leave_scratch(file: Path) -> None:
    for number in range(3):
        scratch = file.parent / f"{SCRATCH_PREFIX}{number}-killed"
        scratch.mkdir()
        (scratch / "content").write_bytes(b"half")
        age = scratch.stat().st_mtime - SCRATCH_SECONDS_MAX - 60
        os.utime(scratch, (age, age))


def _move(path: Path) -> Path:
    path.rename(path.with_name(path.name + "-moved"))
    return path


def _link(path: Path) -> None:
    _move(path).symlink_to(path.name + "-moved")
