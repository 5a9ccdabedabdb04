"""Faults on the cpu device: the error names a kernel's mistake, and the process and the device survive it."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.errors import DeviceFault
from tests.kernels.cpu_helpers import cpu_device, launch

STORE_AT = r"""
extern "C" __global__ void store_at(float* out, long long index) {
    if (blockIdx.x == 2 && threadIdx.x == 5) out[index] = 1.0f;
}
"""

TWO_SHARED = "PK_SHARED(int, first, 32); PK_SHARED(int, second, 100); first[threadIdx.x] = 1; second[i] = first[0];"
POKE = 'extern "C" __global__ void poke(unsigned char* out, int offset) { out[offset] = 1; }'
HEAL = 'extern "C" __global__ void heal(unsigned long long at) { *reinterpret_cast<unsigned char*>(at) = 0xA5; }'
DEEP = r"""
static __noinline__ int deep(int n) {
    volatile int pad[512];
    pad[n & 511] = n;
    return n ? deep(n - 1) + pad[n & 511] : 0;
}
"""


def fault_of(device: CpuDevice, name: str, text: str, arguments: tuple[Any, ...], *, block: int = 32) -> DeviceFault:
    with pytest.raises(DeviceFault) as caught:
        launch(device, name, text, 3, block, arguments)
    return caught.value


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("index", "where"), [(64, "0 bytes past the end"), (164, "400 bytes past the end")])
def test_a_write_past_the_end_names_buffer_and_thread(threads: int, index: int, where: str) -> None:
    """The end of the data lies at the guard page; line tables are in every module, and addr2line reads them."""
    with cpu_device(threads=threads) as device:
        out = device.zeros(64, np.float32, name="scores")
        fault = fault_of(device, "store_at", STORE_AT, (out, np.int64(index)))
        launch(device, "store_at", STORE_AT, 3, 32, (out, np.int64(63)))

        assert f"{where} of buffer 'scores' float32 (64,)" in str(fault)
        line = str(fault.fields["reason"]).split(" at ")[1:]  # where binutils are there
        assert line in ([], ["test_store_at.cu:3"])
        assert ("store_at", (2, 0, 0), (5, 0, 0)) == tuple(fault.fields[k] for k in ("kernel", "block", "thread"))
        assert fault.fields["address"] == device.address(out) + 4 * index
        assert out.tolist() == [0.0] * 63 + [1.0]


NAMED: dict[str, tuple[str, str, tuple[Any, ...], int, str]] = {
    # Parameters and body of a kernel; its arguments, where a text is a buffer of 1024 floats; threads; the message.
    "write_before": ("float* p, int i", "p[i] = 1.0f;", ("keys", -1), 32, r"4 bytes before buffer 'keys' .* \(1024,\)"),
    "read_past": ("float* p, int i", "p[0] = p[i];", ("keys", 1024), 32, "past the end of buffer 'keys'"),
    "null": ("int* p", "p[threadIdx.x] = 1;", (None,), 32, "SIGSEGV"),
    "divide": ("int* p, int d", "*p = 9 / (*p + d) + *p % (d + d);", ("zero", 0), 32, "SIGFPE"),
    "trap": ("int* p", "if (threadIdx.x == 3) __trap();", (None,), 32, "__trap"),
    "overflow": ("int* p", "PK_SHARED(int, o, 1); o[0] = deep(1000);", (None,), 32, "the thread's stack overflowed"),
    "shared_past": ("int i", TWO_SHARED, (101,), 32,
                    r"an access 4 bytes past the end of shared buffer 'second' \(400 bytes\)"),
    "shared_before": ("int i", TWO_SHARED, (-1025,), 32, "before shared buffer 'second'"),
    # 6 bytes in an alignment of 16: the end of the block checks the canary.
    "shared_slack": ("int i", "PK_SHARED(unsigned char, six, 6); six[i] = 1;", (8,), 1,
                     r"shared buffer 'six' \(6 bytes\) was written 2 bytes past its end"),
    "greedy": ("int i", "PK_SHARED(float, small, 1000); PK_SHARED(float, large, 60000); small[0] = large[i];", (0,), 1,
               r"too much shared memory: 'large' \(240000 bytes\) brings the block to 244000 bytes"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_in_a_kernel_is_a_fault_that_names_it(cpu: CpuDevice, name: str) -> None:
    """Guards lie in front of data and behind it, and around each shared array; twenty times over, and none is the last.

    Null pointers, integer division by zero, __trap, a stack that is too small, and more than 227 KiB of shared memory
    are faults too.
    """
    parameters, body, given, block, message = NAMED[name]
    text = f'{DEEP}extern "C" __global__ void {name}({parameters}) {{ {body} }}'
    arguments = tuple(cpu.zeros(1024, np.float32, name=value) if isinstance(value, str)
                      else value if value is None else np.int32(value) for value in given)  # fmt: skip
    for _ in range(20):
        fault = fault_of(cpu, name, text, arguments, block=block)
        assert re.search(message, str(fault))
        assert (name, (0, 0, 0)) == (fault.fields["kernel"], fault.fields["block"])
    launch(cpu, "store_at", STORE_AT, 3, 32, (cpu.zeros(1, np.float32), np.int64(0)))


def test_an_access_to_freed_memory_is_named(cpu: CpuDevice) -> None:
    """A stale pointer holds the address of a freed array."""
    old = cpu.zeros(64, np.int32, name="old plane")
    address = cpu.address(old)
    del old
    gc.collect()
    fault = fault_of(cpu, "heal", HEAL, (np.uint64(address),))

    assert "in buffer 'old plane' int32 (64,), which was freed" in str(fault)


@pytest.mark.parametrize("offset", [10, 15, -1, -700])
def test_a_write_into_the_slack_is_found_by_its_canary(cpu: CpuDevice, offset: int) -> None:
    """10 bytes in 256-byte alignment leave slack before the guard page; canaries lie there and in front."""
    out = cpu.zeros(10, np.uint8, name="bytes")
    cpu.check_canaries()
    launch(cpu, "poke", POKE, 1, 1, (out, np.int32(offset)))
    where = f"{offset - 10} bytes past its end" if offset > 0 else f"{-offset} bytes before its start"
    with pytest.raises(DeviceFault, match=f"buffer 'bytes' uint8 .* was overwritten {where}"):
        cpu.check_canaries()

    launch(cpu, "heal", HEAL, 1, 1, (np.uint64(cpu.address(out) + offset),))
    cpu.check_canaries()


def test_a_canary_is_checked_when_the_buffer_is_freed(cpu: CpuDevice) -> None:
    """The next launch or synchronization raises; a destructor cannot."""
    out = cpu.zeros(10, np.uint8, name="short lived")
    stream = cpu.stream()
    launch(cpu, "poke", POKE, 1, 1, (out, np.int32(12)))
    stream.synchronize()
    del out
    gc.collect()
    with pytest.raises(DeviceFault, match="buffer 'short lived' uint8"):
        stream.synchronize()

    stream.synchronize()


def test_the_last_element_of_shared_memory_may_be_written(cpu: CpuDevice) -> None:
    """Also of an array that ends before its alignment does."""
    for body, last in ((TWO_SHARED, 99), (NAMED["shared_slack"][1], 5)):
        launch(cpu, "last", f'extern "C" __global__ void last(int i) {{ {body} }}', 3, 32, (np.int32(last),))


def test_fresh_memory_is_poison(cpu: CpuDevice) -> None:
    """Device memory at allocation, shared memory at the start of every block; zeros are zero."""
    text = r"""
extern "C" __global__ void poison(unsigned* out) {
    PK_SHARED(unsigned, cell, 32);
    out[blockIdx.x * 32 + threadIdx.x] = cell[threadIdx.x];
    cell[threadIdx.x] = 0;
}"""
    out = cpu.zeros((4, 32), np.uint32)
    launch(cpu, "poison", text, 4, 32, (out,))

    assert np.unique(out).tolist() == [0xFFFFFFFF]
    assert np.unique(cpu.empty(1000, np.uint8)).tolist() == [0xFF]
    assert np.unique(cpu.pinned(1000, np.uint8)).tolist() == [0xFF]
    assert np.unique(cpu.zeros(1000, np.uint8)).tolist() == [0]


def test_a_fault_in_one_block_stops_the_launch_on_every_os_thread() -> None:
    """Blocks that spin until the failed block acts end too."""
    text = r"""
extern "C" __global__ void stuck(int* flag, int* out) {
    if (blockIdx.x == 0) { out[1 << 12] = 1; }
    for (int i = 0; blockIdx.x < 3 && atomicAdd(flag, 0) == 0; ++i) {}
    for (int i = 0; i < 20000; ++i) atomicAdd(out, 1);
}"""
    with cpu_device("descending", threads=3) as device:
        flag, out = device.zeros(1, np.int32), device.zeros(1, np.int32)
        with pytest.raises(DeviceFault) as caught:
            launch(device, "stuck", text, 40, 2, (flag, out))
        flag[0] = 1

        assert caught.value.fields["kernel"] == "stuck"


def test_two_devices_keep_their_buffers_apart() -> None:
    """A fault names a buffer of the device that launched."""
    with cpu_device() as one, cpu_device() as other:
        buffers = {"mine": one.zeros(64, np.float32, name="mine"), "theirs": other.zeros(64, np.float32, name="theirs")}
        for device, name in ((one, "mine"), (other, "theirs")):
            assert f"'{name}'" in str(fault_of(device, "store_at", STORE_AT, (buffers[name], np.int64(64))))


ARRAY_INDEX = r"""
extern "C" __global__ void array_index(int* out, int index) {
    int table[4] = {1, 2, 3, 4};
    out[0] = table[index];
}"""
MISALIGNED = r"""
extern "C" __global__ void misaligned(int* out, const unsigned char* in) {
    out[0] = *reinterpret_cast<const int*>(in + 1);
}"""


def test_the_trap_build_stops_at_a_wrong_index_and_a_misaligned_access() -> None:
    """checks="bounds"; the ordinary build allows both, and a GPU allows the first."""
    with cpu_device(checks="bounds") as device:
        bytes_in, out = device.zeros(64, np.uint8), device.zeros(1, np.int32)
        for name, text, argument in (("array_index", ARRAY_INDEX, np.int32(4)), ("misaligned", MISALIGNED, bytes_in)):
            fault = fault_of(device, name, text, (out, argument), block=1)
            assert "a failed bounds or alignment check" in str(fault)
        launch(device, "array_index", ARRAY_INDEX, 1, 1, (out, np.int32(3)))

        assert int(out[0]) == 4


OUTSIDE = """
import ctypes, faulthandler, sys
import numpy as np
from tests.kernels.cpu_helpers import cpu_device, launch
from pagedkv.errors import DeviceFault
if sys.argv[1] != "plain":
    faulthandler.enable()
with cpu_device() as device:
    for _ in range(2):
        try:
            launch(device, "null", 'extern "C" __global__ void null(int* p) { *p = 1; }', 1, 1, (None,))
        except DeviceFault as fault:
            print("fault in a kernel survived", flush=True)
        if sys.argv[1] == "late":
            faulthandler.disable()
            faulthandler.enable()
    ctypes.string_at(0)
"""


@pytest.mark.parametrize("how", ["plain", "early", "late"])
def test_a_signal_outside_a_kernel_goes_to_the_previous_handler(how: str) -> None:
    """The process dies as it would without us; Python's faulthandler writes its traceback."""
    result = subprocess.run([sys.executable, "-c", OUTSIDE, how], capture_output=True, text=True, timeout=60,
                            check=False)

    assert result.stdout.splitlines() == ["fault in a kernel survived"] * 2
    assert result.returncode == -signal.SIGSEGV
    assert ("Fatal Python error" in result.stderr) == (how != "plain")
