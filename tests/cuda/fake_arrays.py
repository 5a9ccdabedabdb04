"""Arrays of the CuPy that has no GPU: NumPy does the arithmetic, CuPy's rules decide what is legal.

Outside a capture an operation runs at once.  A capturing stream records it: its result gets memory from the current
allocator, and a closure over the operands' *memory* waits for the replay, so the replay reads the bytes at the recorded
addresses.  Nothing runs under capture, so a trial on zeros gives the shape of the result.

The arrays refuse what CuPy or CUDA refuses: NumPy arrays among CuPy's; on a capturing stream matrix products, values
read back, masks that need a count, and allocation outside the graph's pool; work on the default stream meanwhile.

Not modelled: `numpy_array[...] = cupy_array`, which CuPy refuses; a subclass of ndarray cannot refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

LIBRARY_PRODUCTS = frozenset(
    ("matmul", "dot", "einsum", "tensordot", "inner", "vdot", "vecdot", "matvec", "vecmat", "linalg")
)
VIEWS = frozenset(("reshape", "ravel", "transpose", "swapaxes", "moveaxis", "squeeze", "expand_dims", "broadcast_to"))
FROM_HOST = frozenset(("array", "asarray", "ascontiguousarray", "frombuffer", "fromiter"))


class Machine(Protocol):
    """The part of `FakeCupy` that arrays use."""

    @property
    def is_recording(self) -> bool: ...
    def submit(self, work: Callable[[], object]) -> None: ...
    def allocate(self, byte_count: int) -> Any: ...
    def capture_error(self, status: int) -> Exception: ...


def plain(array: FakeArray) -> np.ndarray:
    """Give the same memory as a plain ndarray, which keeps the bytes mapped, but not the pool's block."""
    content: np.ndarray = array.memory.content
    offset = array.ctypes.data - content.ctypes.data
    return np.ndarray(array.shape, array.dtype, content, offset, array.strides)


class FakeArray(np.ndarray):
    """`cupy.ndarray`; each machine has a subclass with `machine` set."""

    machine: Machine
    memory: Any

    def __new__(cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None,
                order: str = "C") -> FakeArray:  # fmt: skip
        resolved = np.dtype(dtype)
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        if memptr is None:
            memptr = cls.machine.allocate(math.prod(extents) * resolved.itemsize)
        assert order == "C", "nothing here asks for another order"
        array = np.ndarray.__new__(cls, extents, resolved, memptr.content, 0, strides)
        array.memory = memptr.mem
        return array

    def __array_finalize__(self, source: Any) -> None:
        self.memory = getattr(source, "memory", None)

    # ---- what CuPy arrays have -------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """`ptr`, `mem` and `device_id`, as CuPy's MemoryPointer."""
        return SimpleNamespace(ptr=int(self.ctypes.data), mem=self.memory, device_id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (int(self.ctypes.data), False), "version": 3}

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        return self._read_back().copy()

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        self._read_back()[...] = arr

    def _read_back(self) -> np.ndarray:
        if self.machine.is_recording:
            raise self.machine.capture_error(900)
        return plain(self)

    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")

    # ---- operations ------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        outs = options.pop("out", ())
        name = ufunc.__name__
        self._refuse_product(name)
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return self._operate(function, inputs, options, outs)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        name = function.__name__
        self._refuse_product(name)
        if name in FROM_HOST:
            raise TypeError(f"the fake does not make arrays from the host inside array functions: {name}")
        if name in VIEWS:
            return self._view_of(function(*(_unwrap(a) for a in args), **options), args[0])
        if name == "copyto":
            target, source = args
            self._check(source, *options.values())
            values, flags = _unwrap(source), {key: _unwrap(value) for key, value in options.items()}
            raw = plain(target)
            self.machine.submit(lambda: np.copyto(raw, values, **flags))
            return None
        outs = options.pop("out", None)
        return self._operate(function, args, options, () if outs is None else (outs,))

    def _operate(self, function: Any, args: Any, options: dict[str, Any], outs: tuple[Any, ...]) -> Any:
        self._check(*args, *options.values(), *outs)
        raw = [_unwrap(argument) for argument in args]
        flags = {key: _unwrap(value) for key, value in options.items()}
        if outs:
            (out,) = outs
            target = plain(out)
            self.machine.submit(lambda: function(*raw, out=target, **flags))
            return out
        if not self.machine.is_recording:
            self.machine.submit(lambda: None)
            return self._wrapped(np.asarray(function(*raw, **flags)))
        trial = np.asarray(function(*(_zeros(a) for a in raw), **{key: _zeros(v) for key, v in flags.items()}))
        result = type(self)(trial.shape, trial.dtype)
        landing = plain(result)
        self.machine.submit(lambda: np.copyto(landing, function(*raw, **flags)))
        return result

    def _wrapped(self, values: np.ndarray) -> FakeArray:
        result = type(self)(values.shape, values.dtype)
        plain(result)[...] = values
        return result

    def _view_of(self, values: np.ndarray, source: FakeArray) -> Any:
        if not np.may_share_memory(values, plain(source)):
            return self._operate(np.array, (values,), {}, ()) if not self.machine.is_recording else source.copy()
        view = values.view(type(self))
        view.memory = source.memory
        return view

    def _check(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, np.ndarray) and not isinstance(value, FakeArray):
                raise TypeError(f"Unsupported type {type(value)}")
            if isinstance(value, list | tuple):
                self._check(*value)

    def _refuse_product(self, name: str) -> None:
        if name in LIBRARY_PRODUCTS and self.machine.is_recording:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    # ---- methods that NumPy does not dispatch ----------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(k, np.ndarray | list) for k in keys):
            # An integer for every axis gives a view without axes, not a scalar.
            whole = keys if Ellipsis in [k for k in keys if not isinstance(k, np.ndarray)] else (*keys, Ellipsis)
            return np.ndarray.__getitem__(self, whole)
        if self.machine.is_recording:
            self._check(*keys)
        self._refuse_mask(keys)
        return self._operate(_take, (self, *(_unwrap_key(k, self) for k in keys)), {}, ())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(value)
        keys = key if isinstance(key, tuple) else (key,)
        self._refuse_mask(keys)
        raw_keys, raw_value, raw = tuple(_unwrap(k) for k in keys), _unwrap(value), plain(self)
        self.machine.submit(lambda: raw.__setitem__(raw_keys, raw_value))

    def _refuse_mask(self, keys: tuple[Any, ...]) -> None:
        if self.machine.is_recording and any(isinstance(k, np.ndarray) and k.dtype == bool for k in keys):
            raise self.machine.capture_error(900)  # the number of hits is read back

    def reshape(self, *shape: Any, order: str = "C") -> Any:  # type: ignore[override]
        values = plain(self).reshape(*shape)
        if np.may_share_memory(values, plain(self)) or not self.size:
            return np.ndarray.reshape(self, *shape)
        return self.copy().reshape(*shape)

    def copy(self, order: str = "C") -> Any:  # type: ignore[override]
        return self._operate(np.array, (self,), {}, ())

    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> Any:  # type: ignore[override]
        return self._operate(np.ndarray.astype, (self, dtype), {}, ())

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:  # type: ignore[override]
        return self._operate(np.sum, (self,), {"axis": axis, "dtype": dtype, "keepdims": keepdims}, ())


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(array: FakeArray, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return array._operate(function, (array,), {"axis": axis, "keepdims": keepdims}, ())

    return reduce


def _value(name: str) -> Callable[..., Any]:
    def read(array: FakeArray, *args: Any) -> Any:
        return getattr(array._read_back(), name)(*args)

    return read


for _name in ("min", "max", "any", "all"):
    setattr(FakeArray, _name, _reduction(getattr(np, _name)))
for _name in ("item", "tolist", "__bool__", "__int__", "__float__"):
    setattr(FakeArray, _name, _value(_name))


def _take(array: np.ndarray, *keys: Any) -> np.ndarray:
    taken: np.ndarray = array[keys]
    return taken


def _unwrap(value: Any) -> Any:
    return _mapped(value, lambda array: plain(array) if isinstance(array, FakeArray) else array)


def _zeros(value: Any) -> Any:
    return _mapped(value, np.zeros_like)


def _mapped(value: Any, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        return function(value)
    return type(value)(_mapped(item, function) for item in value) if isinstance(value, list | tuple) else value


def _unwrap_key(key: Any, like: FakeArray) -> Any:
    # Outside a capture CuPy copies an index from the host.
    if isinstance(key, np.ndarray) and not isinstance(key, FakeArray):
        return like._wrapped(key)
    return key
