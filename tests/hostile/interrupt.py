"""Interrupt: raises an exception at one chosen line of the product, as a signal or a failed allocation would."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pagedkv as pk

PRODUCT = str(Path(pk.__file__).parent)

ERRORS = [(KeyboardInterrupt, 3), pytest.param(KeyboardInterrupt, 1, marks=pytest.mark.long),
          pytest.param(MemoryError, 1, marks=pytest.mark.long)]  # fmt: skip
"""Exceptions, and the distance in lines between two interrupts."""


@dataclass
class Interrupt:
    """Raises an exception at the n-th line of the product that runs; n = 0 counts lines only."""

    at: int
    error: type[BaseException]
    lines: int = 0

    def __enter__(self) -> Interrupt:
        gc.disable()  # a finalizer that the collector runs inside the block would swallow the exception
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise self.error(f"at line {self.at}: {frame.f_code.co_filename}:{frame.f_lineno}")
        return self._trace
