"""The driver's GPUs, and the line on stderr where a GPU stays unused."""

from __future__ import annotations

import pytest

import pagedkv as pk
from pagedkv import devices
from pagedkv.devices.cuda import device as cuda
from pagedkv.devices.cuda.driver import visible_gpu
from pagedkv.devices.cuda.runtime import find_cupy
from tests.cuda.fake_driver import NO_DEVICE, FakeDriver, load_of

CONFIG = pk.StoreConfig(pk.KVGeometry(layers=1, query_heads=1, kv_heads=1, head_dim=64), profile="bf16", max_context=64,
                        max_concurrency=1, kv_capacity=pk.ExplicitCapacity(64))


@pytest.mark.parametrize(("driver", "name"), [
    (None, ""), (FakeDriver(code=NO_DEVICE), ""), (FakeDriver(gpus=0), ""), (FakeDriver(gpus=2), "H200"),
])
def test_the_driver_names_the_gpu_that_this_process_sees(driver: FakeDriver | None, name: str) -> None:
    assert visible_gpu(load_of(driver)) == name


UNUSED = (
    "pagedkv: this machine has a GPU, H200, but the store runs on the cpu device: CuPy is not installed; "
    "run `python -m pip install 'pagedkv[cuda13]'` (or cuda12, as the driver allows)\n"
)


@pytest.mark.parametrize(("driver", "said"), [(FakeDriver(), UNUSED), (None, "")], ids=["gpu", "no-gpu"])
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_gpu_that_stays_unused_is_said_on_stderr(
    name: str, driver: FakeDriver | None, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where "auto" found no CuPy; a machine without a GPU, and a caller who asked for "cpu", hear nothing."""

    def no_cupy(module: str) -> None:
        raise ModuleNotFoundError(module, name="cupy")

    monkeypatch.setattr(cuda, "find_cupy", lambda: find_cupy(no_cupy))
    monkeypatch.setattr(devices, "visible_gpu", lambda: visible_gpu(load_of(driver)))
    with pk.open_store(CONFIG, device=name) as store:
        assert store.device.name == "cpu"

    lines = [line for line in capsys.readouterr().err.splitlines(keepends=True) if "compil" not in line]
    assert "".join(lines) == (said if name == "auto" else "")
