"""`pagedkv bench peers`: which rows it prints, with fakes in the place of the engines; never how fast."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pagedkv.tools import bench_step, command, compare_peers


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, ["bench", "peers", "--rows", "1,3", "--chunks", "1", *arguments])


def put(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """Put a module into sys.modules."""
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def _no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is installed, whatever this machine has."""
    for name in compare_peers.ENGINES:
        monkeypatch.setitem(sys.modules, name, None)
    compare_peers.vllm_model.cache_clear()


class FakeRequest(SimpleNamespace):
    """A request that counts."""

    num_computed_tokens = 0

    def __init__(self, **names: Any) -> None:
        super().__init__(**names, num_prompt_tokens=len(names["prompt_token_ids"]), outputs=[])

    def append_output_token_ids(self, token: int) -> None:
        self.outputs.append(token)


class FakeScheduler:
    """Schedules one prompt a step, and then every request; it stands for vLLM's KVCacheManager too."""

    instances: ClassVar[list[FakeScheduler]] = []

    def __init__(self, **names: Any) -> None:
        print("an engine logs to stdout")
        assert names["block_size"] == 64
        self.requests: dict[str, FakeRequest] = {}
        self.kv_cache_manager = self
        self.instances.append(self)

    @property
    def running(self) -> list[FakeRequest]:
        return list(self.requests.values())

    def add_request(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request

    def allocate_slots(self, request: FakeRequest, tokens: int) -> object:
        return (request, tokens)

    def schedule(self) -> SimpleNamespace:
        for name, request in self.requests.items():
            if not request.num_computed_tokens:
                return SimpleNamespace(num_scheduled_tokens={name: request.num_prompt_tokens})
        return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(self.requests, 1))

    def update_from_output(self, decided: SimpleNamespace, answer: SimpleNamespace) -> None:
        assert len(answer.sampled_token_ids) == len(answer.req_ids) == len(answer.req_id_to_index)
        for name, tokens in decided.num_scheduled_tokens.items():
            self.requests[name].num_computed_tokens += tokens


def put_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "torch", bfloat16="bfloat16")
    put(monkeypatch, "vllm", __version__="9.9")
    put(monkeypatch, "vllm.config", **dict.fromkeys(
        ("ModelConfig", "SchedulerConfig", "CacheConfig", "DeviceConfig", "VllmConfig"), SimpleNamespace))
    interface = dict.fromkeys(("FullAttentionSpec", "KVCacheConfig"), SimpleNamespace)
    put(monkeypatch, "vllm.v1.kv_cache_interface", **interface, KVCacheGroupSpec=lambda layers, spec: (layers, spec))
    put(monkeypatch, "vllm.v1.outputs", ModelRunnerOutput=SimpleNamespace)
    put(monkeypatch, "vllm.v1.structured_output", StructuredOutputManager=lambda config: config)
    put(monkeypatch, "vllm.v1.request", Request=FakeRequest)
    put(monkeypatch, "vllm.sampling_params", SamplingParams=SimpleNamespace)
    put(monkeypatch, "vllm.v1.core.sched.scheduler", Scheduler=FakeScheduler)


def put_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor(np.ndarray[Any, Any]):
        def clone(self) -> Any:
            return self.copy()

        def to(self, dtype: Any) -> Any:
            return self.astype(dtype)

        def split(self, lengths: list[int]) -> list[Any]:
            return np.split(self, np.cumsum(lengths)[:-1])

    def allocate(batch: Any, token_per_req: int) -> None:
        for request in batch.reqs:
            request.kv.kv_allocated_len += token_per_req

    put(monkeypatch, "torch", int64=np.int64, int32=np.int32, bfloat16="bfloat16", set_num_threads=lambda count: None,
        tensor=lambda numbers, dtype: np.array(numbers, dtype).view(Tensor))
    put(monkeypatch, "sglang", __version__="8.8")
    rows, pages = SimpleNamespace(), SimpleNamespace()
    rows.alloc_rows, rows.write = lambda count: list(range(1, count + 1)), lambda where, slots: None
    pages.alloc_extend = lambda *args: np.arange(args[-1]).view(Tensor)
    put(monkeypatch, "sglang.srt.mem_cache.allocation", alloc_for_decode=allocate)
    put(monkeypatch, "sglang.srt.mem_cache.memory_pool", ReqToTokenPool=lambda *args: rows)
    put(monkeypatch, "sglang.srt.mem_cache.allocator.paged", PagedTokenToKVPoolAllocator=lambda *args: pages)
    put(monkeypatch, "sglang.srt.mem_cache.cache_init_params", CacheInitParams=lambda *args: args)
    put(monkeypatch, "sglang.srt.mem_cache.radix_cache", RadixCache=lambda params: params)


def test_without_engines_each_says_how_to_get_it() -> None:
    """Exit code 3; our own rows stand there all the same."""
    result = invoke()

    assert result.exit_code == 3
    assert "vllm    not installed\n        -> python -m pip install vllm\n" in result.stdout
    assert "sglang  not installed\n        -> python -m pip install sglang\n" in result.stdout
    assert all(name in result.stdout for name in ("ledger", "store", "loop"))


def test_each_installed_engine_stands_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0, its version, a figure per row count, only JSON on stdout; a row moves by a token a step."""
    monkeypatch.setattr(FakeScheduler, "instances", [])
    put_sglang(monkeypatch)
    report = json.loads(invoke("--json").stdout)
    assert [(e["engine"], e["version"], e["status"]) for e in report["engines"]] == [
        ("vllm", "", "not installed"), ("sglang", "8.8", "timed")]

    put_vllm(monkeypatch)
    monkeypatch.setitem(sys.modules, "sglang", None)
    result = invoke("--json")
    report = json.loads(result.stdout)
    assert (0, 1, "9.9") == (result.exit_code, report["schema"], report["engines"][0]["version"])
    assert [(f["subject"], f["rows"]) for f in report["steps"][-4:]] == [
        ("vllm-kv", 1), ("vllm-kv", 3), ("vllm-scheduler", 1), ("vllm-scheduler", 3)]
    for scheduler in FakeScheduler.instances:
        moved = [request.num_computed_tokens - request.num_prompt_tokens for request in scheduler.running]
        assert moved[-1] % bench_step.CHUNK_STEPS == 0 < moved[-1]


def needs_another_package(config: object) -> None:
    raise ModuleNotFoundError("No module named 'grammar'", name="grammar")


@pytest.mark.parametrize(("module", "names", "reason", "remedy"), [
    ("vllm.v1.outputs", None, "ModuleNotFoundError: import of", "install vllm 0.33.0, or mend its adapter"),
    ("vllm.v1.request", {}, "AttributeError: ", "install vllm 0.33.0, or mend its adapter in compare_peers.py"),
    ("vllm.v1.structured_output", {"StructuredOutputManager": needs_another_package}, "ModuleNotFoundError: No module",
     "install the package with grammar, which vllm imports"),
])
def test_an_engine_that_the_adapter_does_not_know_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, module: str, names: dict[str, Any] | None, reason: str, remedy: str
) -> None:
    """Exit code 1; the row names both versions and what was not there; the other engine is timed all the same."""
    put_vllm(monkeypatch)
    put_sglang(monkeypatch)
    if names is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        put(monkeypatch, module, **names)
    result = invoke()

    assert result.exit_code == 1
    assert f"vllm    failed, 9.9 (adapter written for 0.33.0): {reason}" in result.stdout
    assert f"        -> {remedy}" in result.stdout
    assert "sglang  timed, 8.8" in result.stdout
