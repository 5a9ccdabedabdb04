"""Mutants: one listed mistake per clause, each of which a test must notice.

    python tools/mutants.py                  every mutant; exit 1 if one survives
    python tools/mutants.py C9 C11.2         those of some clauses
    python tools/mutants.py --list           what there is

A clause counts as tested only if its mutant is killed.  Each mutant is one replacement in one source
file (`mutant_list.py`), made in a copy of the checkout; the tests named beside it run there until the
first failure, which is printed.  A replacement whose text is not found exactly once is an error: the
source moved on and the mutant must be planted anew.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import click

from pagedkv.tools.mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("pagedkv", "graphs", "tools", "cuda_src", "tests", "pyproject.toml", "README.md", ".gitignore")
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the test that died, or why none did."""

    mutant: Mutant
    killed_by: str
    problem: str


def copy_checkout(target: Path) -> None:
    """Copy what tests need; the links of the package stay links."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / name)


def judge(mutant: Mutant, checkout: Path) -> Verdict:
    """Plant a mutant in a copy of the checkout, run its tests, and mend the copy again."""
    path = checkout / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return Verdict(
            mutant, "", f"{text.count(mutant.old)} places in {mutant.file} read {mutant.old!r}: plant it anew"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *mutant.tests],
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except subprocess.TimeoutExpired:
        return Verdict(mutant, f"a test that never ended (stopped after {TIMEOUT_SECONDS} s)", "")
    finally:
        path.write_text(text, encoding="utf-8")
    died = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    if died:
        return Verdict(mutant, died.group(1), "")
    if done.returncode == 0:
        return Verdict(mutant, "", "survived: no test noticed")
    return Verdict(mutant, "", f"pytest ended with {done.returncode} and no failed test:\n{done.stdout}{done.stderr}")


def judge_all(mutants: list[Mutant], *, workers: int) -> list[Verdict]:
    """Judge mutants, each worker in its own copy of the checkout; verdicts in the order of the list."""
    with tempfile.TemporaryDirectory(prefix="pagedkv-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for index in range(workers):
            copy = Path(folder) / str(index)
            copy.mkdir()
            copy_checkout(copy)
            copies.put(copy)

        def judge_one(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return judge(mutant, copy)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(workers) as pool:
            verdicts = []
            for verdict in pool.map(judge_one, mutants):
                mark = f"killed by {verdict.killed_by}" if verdict.killed_by else verdict.problem
                click.echo(f"{verdict.mutant.clause:7} {verdict.mutant.what}: {mark}")
                verdicts.append(verdict)
    return verdicts


def chosen(clauses: tuple[str, ...]) -> list[Mutant]:
    """Return the mutants of some clauses, or all: "C9" means every clause of C9."""
    return [
        mutant
        for mutant in MUTANTS
        if not clauses or any(mutant.clause == name or mutant.clause.startswith(f"{name}.") for name in clauses)
    ]


@click.command()
@click.argument("clauses", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="Print the mutants and run nothing.")
@click.option("--workers", default=2, show_default=True, help="Copies of the checkout that run at a time.")
def main(clauses: tuple[str, ...], only_list: bool, workers: int) -> None:
    """Plant each listed mistake and name the test that notices it."""
    mutants = chosen(clauses)
    if not mutants:
        raise click.UsageError(f"no mutant of {', '.join(clauses)}")
    if only_list:
        for mutant in mutants:
            click.echo(f"{mutant.clause:7} {mutant.what} ({mutant.file})")
        return
    verdicts = judge_all(mutants, workers=workers)
    survivors = [verdict for verdict in verdicts if not verdict.killed_by]
    click.echo(
        f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants killed, "
        f"{len({mutant.clause for mutant in mutants})} clauses",
        err=True,
    )
    if survivors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
