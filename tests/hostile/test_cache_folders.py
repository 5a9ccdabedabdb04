"""Libraries, machine code and weights are used after a check only: hostile states of their folder, and of a build."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices import cache_folder
from pagedkv.devices.cache_folder import SCRATCH_PREFIX, SEAL_BYTES
from pagedkv.devices.cpu import compiler as cpu_compiler
from pagedkv.devices.cpu.compiler import Compiler, build, find_compiler, open_library
from pagedkv.devices.cuda.compiler import compile_module
from pagedkv.errors import MissingRequirement, MisuseError
from pagedkv.tools import doctor
from pagedkv.tools.llama import weights as model_weights
from pagedkv.tools.llama.weights import Vocabulary, load_model
from tests.hostile.cache_folders import FOREIGN_USER, Place, states
from tests.hostile.interrupt import Interrupt
from tests.model.tiny import TINY

STATES_PER_KIND = 257


@dataclass
class Product:
    """One user of the cache folder.

    `use` returns what the user gets, as bytes; `use_other` makes a file of other content; `makes` counts builds.
    """

    kind: str
    use: Callable[[], bytes] = bytes
    use_other: Callable[[], object] = bytes
    makes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def damages(self) -> int:
        return sum("is damaged" in line for line in self.said)


def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Product:
    """Libraries of the cpu device; one real compilation stands for all."""
    product = Product("cpu")
    library = tmp_path / "library.so"
    compiler = find_compiler()
    real = subprocess.run([*compiler.command, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)],
                          input=b'extern "C" int f() { return 1; }', capture_output=True, check=False)
    assert real.returncode == 0, real.stderr
    content = library.read_bytes()

    def compile_quickly(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        product.makes.append(command[0])
        Path(command[command.index("-o") + 1]).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(cpu_compiler, "_run", compile_quickly)

    def use(value: int = 1) -> bytes:
        defines = (("PK_VALUE", str(value)),)
        return build("hostile", "", compiler, defines=defines, announce=product.said.append).read_bytes()[:-SEAL_BYTES]

    product.use, product.use_other = use, lambda: use(2)
    return product


def machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Product:
    """Machine code of the cuda device, from an NVRTC that gives constants."""
    product = Product("cuda")
    answers = {"getVersion": (99, 1), "getPTX": b".b8 pk_signature_f[8] = {2, 8};", "getCUBIN": b"\x7fELF" * 300}

    def invoke(name: str, *arguments: Any) -> Any:
        product.makes += [name] if name.endswith("compileProgram") else []
        return answers.get(name.rpartition(".")[2])

    api: Any = SimpleNamespace(invoke=invoke, compile_error=ZeroDivisionError)

    def use(value: int = 1) -> bytes:
        spec = pk.ModuleSpec("hostile", text="", defines=(("PK_VALUE", str(value)),))
        compiled = compile_module(api, spec, "sm_90", options=(), announce=product.said.append)
        return repr(compiled.signatures).encode() + compiled.cubin

    product.use, product.use_other = use, lambda: use(2)
    return product


def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Product:
    """Converted weights of a tiny model."""
    product = Product("model")
    vocabulary = Vocabulary("smollm", ("a", "b"), (1, 1), (("a", "b"),), 0, 0, adds_bos=False, chat_template="")
    source, other = tmp_path / "one.gguf", tmp_path / "two.gguf"
    source.write_bytes(b"1")
    other.write_bytes(b"2")

    def convert(source: Path, target: Path) -> None:
        product.makes.append(source.name)
        flat = np.arange(model_weights._elements(TINY), dtype=np.float32)
        head = json.dumps({"config": asdict(TINY), "vocabulary": asdict(vocabulary)}).encode()
        target.write_bytes(head + b" " * (64 - (len(head) + 1) % 64) + b"\n" + flat.tobytes())

    monkeypatch.setattr(model_weights, "_convert", convert)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=product.said.append, flush=list))

    def use(path: Path = source) -> bytes:
        loaded, words = load_model(path)
        return repr(words).encode() + loaded.layers[-1].down.tobytes()

    product.use, product.use_other = use, lambda: use(other)
    return product


@pytest.mark.parametrize("make_product", [libraries, machine_code, weights])
def test_hostile_states_are_made_again_or_refused(
    make_product: Callable[[Path, pytest.MonkeyPatch], Product], tmp_path: Path, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody gets other bytes: a damaged file is made again with one line, an unsafe folder is refused by its name."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # 2,000 of them would take a minute
    product = make_product(tmp_path, monkeypatch)
    foreign: set[tuple[int, int]] = set()
    for name in ("stat", "fstat"):
        monkeypatch.setattr(os, name, with_foreign_owners(getattr(os, name), foreign))

    def give_away(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, FOREIGN_USER, -1)
        else:
            foreign.add((path.stat().st_dev, path.stat().st_ino))

    def prepare(number: int) -> Place:
        base = tmp_path / str(number) / "base"
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        folder = base / "pagedkv" / product.kind
        product.use()
        (file,) = folder.iterdir()
        product.use_other()
        (other,) = set(folder.iterdir()) - {file}
        product.makes.clear()
        product.said.clear()
        foreign.clear()
        return Place(base, file, other, give_away)

    place = prepare(0)
    expected = product.use()
    every = list(states(place.file.stat().st_size, seed))
    assert len(every) == STATES_PER_KIND
    for number, state in enumerate(every, start=1):
        place = prepare(number)
        state.plant(place)
        if state.outcome in ("refused", "made, then refused"):
            with pytest.raises(MissingRequirement, match=str(tmp_path)) as caught:
                product.use()
            assert "XDG_CACHE_HOME" in caught.value.remedy, state.name
            assert len(product.makes) == (state.outcome != "refused"), state.name
            assert state.outcome == "refused" or f"delete {place.file}" in caught.value.remedy
            continue
        assert product.use() == expected, state.name
        again = state.outcome == "made again"
        assert (product.damages(), len(product.makes)) == (again, again or state.outcome == "made"), state.name
        assert product.use() == expected, state.name
        assert len(product.makes) <= 1, f"{state.name}: made at each use"
        left = [entry.name for entry in place.folder.iterdir() if entry.name.startswith(SCRATCH_PREFIX)]
        assert left == ([f"{SCRATCH_PREFIX}1-a"] if "of now" in state.name else []), state.name


def with_foreign_owners(function: Any, foreign: set[tuple[int, int]]) -> Any:
    """Return `os.stat` or `os.fstat` with another owner for some inodes: without root nothing can be given away."""

    def show(*arguments: Any, **options: Any) -> os.stat_result:
        status: os.stat_result = function(*arguments, **options)
        if (status.st_dev, status.st_ino) not in foreign:
            return status
        return os.stat_result((*status[:4], FOREIGN_USER, *status[5:10]), {"st_mtime_ns": 0, "st_ctime_ns": 0})

    return show


# ---- one file through the mechanism ----------------------------------------------------------------------------------
def write_x(path: Path) -> None:
    path.write_bytes(b"x")


def folder_for(tmp_path: Path, said: list[str] | None = None) -> pk.CacheFolder:
    return pk.CacheFolder("kind", base=tmp_path, announce=(said if said is not None else []).append)


def failing(function: Any, code: int, *, when: Callable[..., bool] = lambda *a, **k: True) -> Any:
    """Return a system call that fails where `when` says so."""

    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments, **options):
            raise OSError(code, os.strerror(code))
        return function(*arguments, **options)

    return call


def test_a_file_that_is_damaged_again_is_an_error_that_says_what_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rebuild, not a loop."""
    monkeypatch.setattr(cache_folder, "_seal", lambda name, descriptor, size: os.urandom(SEAL_BYTES))
    with pytest.raises(MissingRequirement, match=f"delete {tmp_path}/kind/x and check the disk"):
        folder_for(tmp_path).file("x", write_x)


def test_an_interrupt_at_any_line_is_what_the_caller_gets(tmp_path: Path) -> None:
    """No descriptor is closed twice, which would be an error of its own, or close a file of another thread."""
    lines = at = 0
    while at <= lines:
        folder = folder_for(tmp_path / str(at))
        with pytest.raises(KeyboardInterrupt) if at else nullcontext(), Interrupt(at, KeyboardInterrupt) as count:
            folder.file("x", write_x)
        lines = lines or count.lines
        assert folder.file("x", write_x).read_bytes()[:-SEAL_BYTES] == b"x", f"interrupted at line {at}"
        at += 1


@pytest.mark.parametrize("call", ["make", "pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_named_and_leaves_nothing(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if call != "make":
        monkeypatch.setattr(os, call, failing(getattr(os, call), code))
    with pytest.raises(MissingRequirement, match=f"no space left in {tmp_path}/kind; free some"):
        folder_for(tmp_path).file("x", failing(write_x, code, when=lambda path: call == "make"))

    assert list((tmp_path / "kind").iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_still_read(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is used; what is not there is built in a temporary folder of this process, with one line."""
    said: list[str] = []
    folder = folder_for(tmp_path, said)
    there = folder.file("there", write_x)
    monkeypatch.setattr(cache_folder._Temporary, "base", None)
    inside = failing(os.mkdir, code, when=lambda path, *a, **k: str(path).startswith(SCRATCH_PREFIX) and not said)
    monkeypatch.setattr(os, "mkdir", inside)

    assert folder.file("there", write_x) == there
    path = folder.file("new", write_x)
    assert path.read_bytes()[:-SEAL_BYTES] == b"x"
    assert tmp_path not in path.parents
    assert 1 == len(said)
    assert f"{tmp_path}/kind: {os.strerror(code)}; this process builds in {path.parent.parent}" in said[0]
    assert "set XDG_CACHE_HOME to a writable folder" in said[0]


HOMELESS = """
import os, pwd
from pathlib import Path
pwd.getpwuid = {}.__getitem__  # no entry
import pagedkv as pk
said = []
folder = pk.CacheFolder("kind", announce=said.append)
path = folder.file("x", lambda path: path.write_bytes(b"x") and None)
assert folder.file("x", None) == path
assert len(said) == 1 and "$HOME" in said[0] and "set XDG_CACHE_HOME" in said[0], said
try:
    folder.check()
except pk.MissingRequirement as missing:
    print(path)
"""


def test_without_a_home_folder_the_process_builds_in_a_temporary_one(root: Path, tmp_path: Path) -> None:
    """The relative XDG_CACHE_HOME is ignored, as its specification says; the folder goes with the process."""
    environment = {"XDG_CACHE_HOME": "relative", "HOME": "", "TMPDIR": str(tmp_path), "PYTHONPATH": str(root)}
    result = subprocess.run([sys.executable, "-c", HOMELESS], env=environment, cwd=tmp_path, capture_output=True,
                            text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert pk.CacheFolder("cpu").path == tmp_path / ".cache" / "pagedkv" / "cpu"


TRUNCATED = """
import pagedkv as pk
from pagedkv.devices.cpu.compiler import build_runtime, find_compiler
path = build_runtime(find_compiler())
with path.open("r+b") as library:
    library.truncate(8192)
pk.open_device("cpu").close()
"""


def test_a_truncated_library_does_not_kill_the_process(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never reaches `dlopen`, which would end in SIGBUS."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(cpu_compiler.zig_cache_folder()))
    result = subprocess.run([sys.executable, "-c", TRUNCATED], env=environment, cwd=root, capture_output=True,
                            text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert 1 == result.stderr.count("is damaged")


# ---- compilers that are none -----------------------------------------------------------------------------------------
FAKE = """#!{python}
import os, sys, signal
if "--version" in sys.argv: print("fake 1"); sys.exit(0)
out = sys.argv[sys.argv.index("-o") + 1]
{does}
"""


@pytest.mark.parametrize(("does", "expected", "message"), [
    ("", MissingRequirement, "writes no library"),
    ("open(out, 'w').close()", MissingRequirement, "a file that is no shared library"),
    ("open(out, 'w').write('hello' * 10)", MissingRequirement, "a file that is no shared library"),
    ("open(out, 'wb').write(open('/proc/self/exe', 'rb').read(16) + b'\\1' * 99)", MissingRequirement, "no shared lib"),
    ("os.mkdir(out)", MissingRequirement, "writes no library"),
    ("sys.exit(3)", MissingRequirement, "does not compile hostile: exit code 3"),
    ("os.kill(os.getpid(), signal.SIGKILL)", MissingRequirement, "got signal SIGKILL.*more memory"),
    ("sys.exit('g++: fatal error: Killed signal terminated program cc1plus')", MissingRequirement, "more memory"),
    ("sys.exit('as: x.o: No space left on device')", MissingRequirement, "no space left in one of"),
    ("sys.exit('hostile.cu:1:1: error: expected')", MisuseError, "mend the text of ModuleSpec 'hostile'"),
])
def test_each_failure_of_a_compiler_has_its_own_name(
    does: str, expected: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """"Mend the source" only for a text of the caller in which the compiler found errors."""
    fake = tmp_path / "c++"
    fake.write_text(FAKE.format(python=sys.executable, does=does), encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(expected, match=f"(?s){message}"):
        build("hostile", "int f;", find_compiler(), announce=lambda line: None)
    with pytest.raises(MissingRequirement):
        build("hostile", "int f;", find_compiler(), announce=lambda line: None, is_shipped=True)

    assert list((tmp_path / "cache" / "pagedkv" / "cpu").iterdir()) == []


@pytest.mark.parametrize(("value", "message"), [
    ('g++ "-O2', "No closing quotation"), ("/", "which is a folder"), (__file__, "which is not executable"),
    ("no-such-compiler", "which is not on PATH"),
])
def test_a_cxx_that_is_no_program_is_named(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor says the same instead of a traceback."""
    monkeypatch.setenv("CXX", value)
    with pytest.raises(MissingRequirement, match=message):
        find_compiler()

    assert doctor.check_compiler().status == "missing"


def test_a_program_that_the_system_cannot_run_is_no_compiler(tmp_path: Path) -> None:
    program = tmp_path / "c++"
    program.write_bytes(b"\x7fELF nothing")
    program.chmod(0o755)
    with pytest.raises(MissingRequirement, match="which does not run: Exec format error"):
        build("hostile", "", Compiler("gcc", (str(program),), "none"), announce=lambda line: None)


def test_a_folder_without_execution_is_named(tmp_path: Path) -> None:
    """`dlopen` speaks of a segment; a file that is no library for this system is deleted instead."""
    library = tmp_path / "x.so"
    library.write_bytes(b"none")
    with pytest.raises(MissingRequirement, match=f"delete {library}"):
        open_library(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctypes.CDLL", failing(None, errno.EPERM))
        with pytest.raises(MissingRequirement, match=r"set XDG_CACHE_HOME to a folder on a file system .* noexec"):
            open_library(library)


def test_the_doctor_reports_an_unsafe_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = doctor.check_cache_folder()
    assert (check.status, str(tmp_path / "pagedkv") in check.found) == ("ok", True)

    (tmp_path / "pagedkv" / "cuda").chmod(0o777)
    check = doctor.check_cache_folder()
    assert (check.status, f"{tmp_path}/pagedkv/cuda: mode 0777" in check.found) == ("missing", True)
    assert "chmod go-w" in check.remedy


def test_a_source_that_is_ours_is_not_the_callers_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC that refuses sources of the library is what must be replaced; a caller's text is the caller's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def invoke(name: str, *arguments: Any) -> Any:
        if name.endswith("compileProgram"):
            raise ZeroDivisionError
        return (99, 2) if name.endswith("getVersion") else "error: no"

    api: Any = SimpleNamespace(invoke=invoke, compile_error=ZeroDivisionError)
    for spec, expected in (
        (pk.ModuleSpec("ours", sources=("kernels/page_moves.cu",)), MissingRequirement),
        (pk.ModuleSpec("theirs", text=""), MisuseError),
    ):
        with pytest.raises(expected, match="error: no"):
            compile_module(api, spec, "sm_90", options=(), announce=lambda line: None)
