"""The README's code runs unchanged and prints the output that its comments state."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pagedkv as pk
from pagedkv.graphs import DecodeLoop

README = Path(__file__).resolve().parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def printed(code: str, folder: Path) -> list[str]:
    """Return the lines that code prints, in a process and a folder of its own."""
    script = folder / "example.py"
    script.write_text(code, encoding="utf-8")
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=folder,
                             env={**os.environ, "PYTHONPATH": str(README.parent)}, check=False)

    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def comment_of(code: str, start: str) -> str:
    """Return the comment of the only line with this start."""
    (line,) = [line for line in code.splitlines() if line.strip().startswith(start)]
    return line.partition(" # ")[2]


def test_the_fifteen_lines_run(tmp_path: Path) -> None:
    """A reader who pastes the embedding example gets the twenty tokens of its comment and no error."""
    assert len(BLOCKS[0].splitlines()) == 15
    (line,) = printed(BLOCKS[0], tmp_path)
    parts = re.findall(r"\[(\d+)\] \* (\d+)", comment_of(BLOCKS[0], "print("))
    tokens = [int(token) for token, count in parts for _ in range(int(count))]

    assert ast.literal_eval(line) == tokens
    assert len(tokens) == 20


def test_the_second_example_goes_on_from_the_first(tmp_path: Path) -> None:
    """Fork, Snapshot and Move as the README shows them."""
    assert printed("\n".join(BLOCKS[:2]), tmp_path)[1:] == [comment_of(BLOCKS[1], "print(")]


def test_the_scheduler_serves_requests(tmp_path: Path) -> None:
    """The example runs behind the model of the first one."""
    model = BLOCKS[0].partition("with pk.open_store")[0]

    assert printed(f"{model}\n{BLOCKS[3]}", tmp_path) == [comment_of(BLOCKS[3], "print(")]


def test_pages_go_to_the_host_and_come_back(tmp_path: Path) -> None:
    """The example runs behind the model of the first one."""
    model = BLOCKS[0].partition("with pk.open_store")[0]

    assert printed(f"{model}\n{BLOCKS[2]}", tmp_path) == [comment_of(BLOCKS[2], "print(")]


def test_the_own_loop_ends_at_the_end_of_the_reserved_pages(tmp_path: Path) -> None:
    """The loop runs a prompt and nine units of three accepted tokens."""
    imports = BLOCKS[0].splitlines()[0]

    assert printed(f"{imports}\n{BLOCKS[4]}", tmp_path) == [comment_of(BLOCKS[4], "print(")]


def test_the_last_example_prints_its_comments(tmp_path: Path) -> None:
    """An event, the counters, and a journal that can be replayed."""
    event, counts = printed(BLOCKS[5], tmp_path)

    assert event == comment_of(BLOCKS[5], "store.trim(")
    assert comment_of(BLOCKS[5], "print(") == f"{counts}, observed or not"
    with (tmp_path / "run.jsonl").open(encoding="utf-8") as lines:
        assert pk.replay_journal(lines).difference is None


def test_the_calls_of_your_own_loop_exist() -> None:
    """Each row of the table names a method of `Store` or `DecodeLoop`."""
    section = TEXT.partition("## Your own loop")[2].partition("\n## ")[0]
    calls = [name for row in section.splitlines() if row.startswith("| `")
             for name in re.findall(r"(store|loop)\.(\w+)\(", row.split(" | ")[0])]  # fmt: skip

    assert len(calls) == 19
    assert [] == [name for owner, name in calls if not hasattr(pk.Store if owner == "store" else DecodeLoop, name)]


def test_files_and_extras_that_the_readme_names_exist() -> None:
    """The README and the checkout have the file, and pyproject.toml each extra of an install command."""
    for name in ("tools/bootstrap.py", "tests/test_tour.py", "pagedkv/contract.md", "cuda_src/kernels/append.cu"):
        assert name in TEXT
        assert (README.parent / name).is_file()
    project = (README.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"'\.\[(\w+)\]'", TEXT)

    assert extras
    assert [] == [extra for extra in extras if f"\n{extra} = [" not in project]
