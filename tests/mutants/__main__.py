"""Plant each listed mutant in a copy of the checkout, and demand that everyone named beside it notices.

    python -m tests.mutants                          every mutant; exit code 1 if one survives
    python -m tests.mutants --clause C9 --file pool  those of some clauses, in some files
    python -m tests.mutants --list                   what there is

First the control: every catcher must pass without a mutant.  With `--no-control` that is left out for catchers that are
tests of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import click

from tests.checkout import ROOT
from tests.mutants.entries import MUTANTS
from tests.mutants.mutant import Catcher, Misplaced, Mutant

COPIED = ("pagedkv", "graphs", "tools", "cuda_src", "tests", "pyproject.toml", "README.md", ".gitignore")
TIMEOUT_SECONDS = 120
EXIT_CAUGHT = 1
FAILURE = re.compile(r"^(?:(?:FAILED|ERROR) tests/|event |seed \d).*", re.MULTILINE)
BROKEN = re.compile(r".*(?:NameError: name |SyntaxError: |\berror: ).*")
"""The output for a mutant that neither Python nor a compiler can read: such a mutant proves nothing."""


@dataclass(frozen=True)
class Verdict:
    """The result of one catcher on a copy of the checkout, with the first failure or why the result does not count.

    A verdict is absent where the command needs a tool that is not here.
    """

    is_caught: bool
    message: str
    seconds: float = 0.0
    is_absent: bool = False


class Copy:
    """A copy of the checkout; one mutant at a time is planted in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plantings = 0
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True)
            elif source.exists():
                shutil.copy2(source, folder / name)
        for shared in (ROOT / "shared", ROOT.parent / "shared"):  # the emulator, where there is one
            if shared.is_dir():
                (folder / "shared").symlink_to(shared)
                break

    def judge(self, mutant: Mutant) -> list[Verdict]:
        """Plant a mutant, run everyone who must notice, and mend the copy."""
        try:
            texts = mutant.texts(self.folder)
        except Misplaced as misplaced:
            return [Verdict(False, str(misplaced))]
        originals = {path: (path.read_bytes(), path.stat().st_mtime) for path in texts}
        self._plantings += 1
        try:
            for path, text in texts.items():
                path.write_text(text, encoding="utf-8")
                # Compiled modules are valid for one second of the file's time, so every planting gets its own.
                os.utime(path, (self._plantings, self._plantings))
            return [self.run(catcher) for catcher in mutant.catchers]
        finally:
            for path, (content, time_written) in originals.items():
                path.write_bytes(content)
                os.utime(path, (time_written, time_written))

    def run(self, catcher: Catcher) -> Verdict:
        """Run a catcher on the copy as it is."""
        start = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, *catcher.arguments], cwd=self.folder, capture_output=True, text=True,
                timeout=TIMEOUT_SECONDS, check=False, env={**os.environ, "PYTHONPATH": str(self.folder)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Verdict(True, f"no end (stopped after {TIMEOUT_SECONDS} s)", TIMEOUT_SECONDS)
        seconds = time.monotonic() - start
        missing = [pattern for pattern in catcher.says if not re.search(pattern, done.stdout)]
        if broken := BROKEN.search(done.stdout):
            return Verdict(False, f"the mutant is no program: {broken[0]}", seconds)
        if done.returncode == EXIT_CAUGHT and not missing:
            failure = FAILURE.search(done.stdout)
            return Verdict(True, failure[0] if failure else "it failed", seconds)
        if done.returncode == 0:
            is_absent = re.search(r"^\d+ skipped", done.stdout, flags=re.MULTILINE) is not None
            return Verdict(False, "it was skipped" if is_absent else "it passed", seconds, is_absent)
        message = f"it ended with {done.returncode}" + (f" and did not say {missing}" if missing else "")
        return Verdict(False, f"{message}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}", seconds)


def selected(clauses: tuple[str, ...], files: tuple[str, ...]) -> list[Mutant]:
    """Return the mutants of some clauses ("C9" means every clause of C9) in files whose names contain some text."""
    return [mutant for mutant in MUTANTS
            if (not clauses or any(f"{mutant.clause}.".startswith(f"{name}.") for name in clauses))
            and (not files or any(name in file for name in files for file in mutant.files))]  # fmt: skip


def report(label: str, catcher: Catcher, verdict: Verdict, *, expected: bool) -> bool:
    """Print one line; return whether the verdict is the expected one."""
    is_right = verdict.is_absent or verdict.is_caught == expected
    mark = "absent" if verdict.is_absent else "ok" if is_right else "SURVIVED" if expected else "FAILS WITHOUT A MUTANT"
    click.echo(f"{mark:8} {verdict.seconds:5.1f} s  {label} | {catcher} | {verdict.message}")
    return is_right


@click.command()
@click.option("--clause", "clauses", multiple=True, help="Mutants of this clause or section only.")
@click.option("--file", "files", multiple=True, help="Mutants of files whose names contain this text only.")
@click.option("--list", "only_list", is_flag=True, help="Print the mutants and run nothing.")
@click.option("--jobs", default=2, show_default=True, help="Copies of the checkout that run at a time.")
@click.option("--control/--no-control", default=True, help="Run every catcher without a mutant first.")
def main(clauses: tuple[str, ...], files: tuple[str, ...], only_list: bool, jobs: int, control: bool) -> None:
    """Plant each listed mutant and name what notices it."""
    mutants = selected(clauses, files)
    if not mutants:
        raise click.UsageError("no mutant is like that")
    if only_list:
        for mutant in mutants:
            click.echo(f"{mutant.clause:7} {mutant.what} ({mutant.place}): {', '.join(map(str, mutant.catchers))}")
        return
    with tempfile.TemporaryDirectory(prefix="pagedkv-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for index in range(jobs):
            copies.put(Copy(Path(folder) / str(index)))

        def on_a_copy(subject: Mutant | Catcher) -> list[Verdict]:
            copy = copies.get()
            try:
                return copy.judge(subject) if isinstance(subject, Mutant) else [copy.run(subject)]
            finally:
                copies.put(copy)

        controls = [each for each in dict.fromkeys(catcher for mutant in mutants for catcher in mutant.catchers)
                    if control or each.needs_control]  # fmt: skip
        is_right = True
        for catcher, (verdict,) in zip(controls, pool.map(on_a_copy, controls), strict=True):
            is_right &= report("control", catcher, verdict, expected=False)
        if not is_right:
            raise SystemExit("the control fails, so no verdict would count")
        survivors = []
        for mutant, verdicts in zip(mutants, pool.map(on_a_copy, mutants), strict=True):
            label = f"{mutant.clause} {mutant.what}"
            lines = [report(label, *each, expected=True) for each in zip(mutant.catchers, verdicts, strict=False)]
            if not all(lines):
                survivors.append(label)
    click.echo(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants caught, "
               f"{len({mutant.clause for mutant in mutants})} clauses", err=True)  # fmt: skip
    if survivors:
        raise SystemExit("survived: " + "; ".join(survivors))


if __name__ == "__main__":
    main()
