"""What `call` accepts: functions and arguments that mean the same at every replay."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.device import BaseDevice
from pagedkv.devices.protocol import cpu_only
from pagedkv.errors import CaptureRefused, MisuseError
from tests.kernels.cpu_helpers import captured

STEP = 2.0
NAMES = ("a", frozenset((1, 2)))
TABLE = {"a": 1.0}
LIMITS = [1.0]
STATE = np.zeros(4)
FN = "case"


class Accumulator:
    """A class may be named; an instance may not."""

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, target: Any) -> None:
        target += self.total


ACCUMULATOR = Accumulator()
this_module = sys.modules[__name__]


def function_of(body: str, parameters: str = "target") -> Callable[..., Any]:
    """Define a function of this module, with this body of one line."""
    defined: dict[str, Callable[..., Any]] = {}
    exec(f"def {FN}({parameters}):\n    {body}", globals(), defined)
    return defined[FN]


def with_defaults(target: Any, scale: float = 2.0, *, axis: tuple[int, ...] = (0,)) -> None:
    target += scale * len(axis)


def with_a_local_function(target: Any) -> None:
    amounts = [float(i) for i in range(3)]

    def total() -> float:
        return sum(amounts)

    target += total()


def recursive(target: Any, depth: int = 2) -> None:
    target += 1
    if depth:
        recursive(target, depth - 1)


plain = function_of("target[:] = np.sqrt(4.0) * STEP + len(NAMES)")
with_scalars = function_of("target[:] = [whole, flag, typed, real]", "target, whole, flag, typed, real")


def makes_an_instance(target: Any) -> None:
    accumulator = Accumulator()
    accumulator.total = 3.0
    accumulator.add(target)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(("fn", "arguments", "expected"), [
    (plain, (), [6.0] * 4), (with_defaults, (3.0,), [3.0] * 4), (with_a_local_function, (), [3.0] * 4),
    (recursive, (), [3.0] * 4), (with_scalars, (7, True, np.float32(2.5), -1.0), [7.0, 1.0, 2.5, -1.0]),
    (makes_an_instance, (), [3.0] * 4),
])
def test_plain_functions_run(
    device: BaseDevice, fn: Callable[..., Any], arguments: tuple[Any, ...], expected: list[float], is_captured: bool
) -> None:
    """Constants, modules, classes, defaults, local functions, recursion and scalars; eager and replayed."""
    target, stream = device.zeros(4, np.float32), device.stream()
    if is_captured:
        device.begin_capture(stream)
    device.call(stream, fn, target, *arguments)
    if is_captured:
        device.end_capture(stream).launch(stream)

    assert target.tolist() == expected


reads_a_dict = function_of("target += TABLE['a']")


def closing_over(value: float) -> tuple[Callable[..., Any], ...]:
    def inner(target: Any) -> None:
        target += value

    def without_closure(target: Any) -> None:
        target += 1

    return inner, without_closure, lambda target: target + value


CLOSURE, NESTED, LAMBDA = closing_over(1.0)
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "closure": (CLOSURE, "closing over value"),
    "nested": (NESTED, "defined in a function"),
    "lambda": (LAMBDA, "closing over value"),
    "bound method": (ACCUMULATOR.add, "got method Accumulator.add"),
    "partial": (functools.partial(plain), "got partial"),
    "callable class": (Accumulator, "got type Accumulator"),
    "builtin": (len, "got builtin_function_or_method len"),
    "dict": (reads_a_dict, "reading TABLE, a dict"),
    "list": (function_of("target += LIMITS[0]"), "reading LIMITS, a list"),
    "array": (function_of("target += STATE"), "reading STATE, a ndarray"),
    "instance": (function_of("ACCUMULATOR.add(target)"), "reading ACCUMULATOR, a Accumulator"),
    "global": (function_of("global STEP; STEP = float(target[0])"), "assigning STEP"),
    "default": (function_of("seen.append(float(target[0]))", "target, seen=[]"), r"default \[\]"),
    "keyword default": (function_of("seen['n'] = len(target)", "target, *, seen={}"), r"default \{\}"),
    "callee": (function_of("reads_a_dict(target)"), "case reading TABLE"),
    "comprehension": (function_of("target += sum(LIMITS[i] for i in range(1))"), "reading LIMITS"),
    "module": (function_of("this_module.LIMITS.append(target)"), "reading LIMITS"),
}


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_sees_what_changes_is_refused(device: BaseDevice, name: str, is_captured: bool) -> None:
    """Closures, methods, mutable globals and defaults, found through callees and comprehensions too."""
    fn, message = REFUSED[name]
    target, stream = device.zeros(4, np.float32), device.stream()
    if is_captured:
        device.begin_capture(stream)
    with pytest.raises(MisuseError, match=f"call of .*{message}"):
        device.call(stream, fn, target)
    if is_captured:
        assert device.end_capture(stream).nodes == ()

    assert not target.any()


@pytest.mark.parametrize(
    "argument", [np.zeros(4), [1.0], "text", None, {"a": 1}, object(), np.array([1])], ids=lambda a: type(a).__name__
)
def test_arguments_are_device_arrays_pinned_arrays_and_scalars(device: BaseDevice, argument: Any) -> None:
    """Pageable memory can move under a graph; anything else can change."""
    target, stream = device.zeros(4, np.float32), device.stream()
    with pytest.raises(MisuseError, match="arrays of this device, pinned arrays and scalars"):
        device.call(stream, with_defaults, target, argument)

    assert not target.any()


def test_a_call_sees_views_of_the_recorded_arrays(device: BaseDevice) -> None:
    """Strided views too; it writes to the same memory."""
    matrix, staging, stream = device.zeros((4, 4), np.float32), device.pinned(4, np.float32), device.stream()
    staging[:] = 0
    graph = captured(device, stream,
                     lambda: device.call(stream, plain, matrix[:, 1]), lambda: device.call(stream, plain, staging))
    graph.launch(stream)

    assert matrix.sum(axis=0).tolist() == [0.0, 24.0, 0.0, 0.0]
    assert staging.tolist() == [6.0] * 4


def product(out: Any, a: Any) -> None:
    out[:] = a @ a


@cpu_only
def marked(out: Any, a: Any) -> None:
    product(out, a)


PRODUCTS = {
    "operator": "out[:] = a @ a",
    "matmul": "np.matmul(a, a, out=out)",
    "method": "out[:] = a.dot(a)",
    "einsum": "out[:] = np.einsum('ij,jk->ik', a, a)",
    "linalg": "out[:] = np.linalg.matrix_power(a, 2)",
    "import": "from numpy import tensordot as product; out[:] = product(a, a, 1)",
    "callee": "product(out, a)",
    "in place": "out[:] = a; out @= a",
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_library_matrix_products_are_refused_under_capture(cpu: CpuDevice, name: str) -> None:
    """cuBLAS refuses a capturing stream; eagerly they run."""
    fn = function_of(PRODUCTS[name], "out, a")
    a, out, stream = cpu.zeros((3, 3), np.float32), cpu.zeros((3, 3), np.float32), cpu.stream()
    a[:] = np.arange(9).reshape(3, 3)
    cpu.call(stream, fn, out, a)
    expected = a @ a
    assert np.array_equal(expected, out)
    cpu.begin_capture(stream)
    with pytest.raises(CaptureRefused, match="library matrix product"):
        cpu.call(stream, fn, out, a)

    assert cpu.end_capture(stream).nodes == ()


def test_a_function_marked_cpu_only_may_use_matrix_products(cpu: CpuDevice) -> None:
    """The mark covers what it calls."""
    a, out, stream = cpu.zeros((3, 3), np.float32), cpu.zeros((3, 3), np.float32), cpu.stream()
    graph = captured(cpu, stream, lambda: cpu.call(stream, marked, out, a))
    a[:] = np.arange(9).reshape(3, 3)
    graph.launch(stream)

    assert np.array_equal(a @ a, out)


def fails(target: Any) -> None:
    target[:] = 1
    raise ZeroDivisionError


def test_an_exception_in_a_call_reaches_the_caller(cpu: CpuDevice) -> None:
    """At submission in eager mode, at the launch of a graph."""
    target, stream = cpu.zeros(4, np.float32), cpu.stream()
    graph = captured(cpu, stream, lambda: cpu.call(stream, fails, target))
    for use in (lambda: cpu.call(stream, fails, target), lambda: graph.launch(stream)):
        with pytest.raises(ZeroDivisionError):
            use()
