"""Triton's own Autotuner under several threads, without and with the guard; only launches are stood in for."""

import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dflash_trainer import autotune

triton = pytest.importorskip("triton", reason="Triton is not installed, so there is no autotuner to guard")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import CompiledKernel  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

THREADS = 8
BLOCKS = (16, 32, 64, 128)
BEST = 64
DEADLINE = 20


class Number:
    """What a kernel here works on, as far as the autotuner looks at a tensor."""

    dtype = "number"

    def __init__(self, value: int) -> None:
        self.value = value

    def clone(self) -> "Number":
        return Number(self.value)

    def copy_(self, other: "Number") -> None:
        self.value = other.value


class Kernel:
    """An autotuned kernel that adds one. `measure` runs inside of every measurement."""

    def __init__(self, measure: Callable[[], object] = lambda: None, keep: bool = False) -> None:
        @triton.jit
        def add_one(x: Any, size: Any, BLOCK: triton.language.constexpr) -> None:
            pass

        self.measure = measure
        self.measured = 0
        self.used: list[int] = []
        add_one.run = self._launch
        configs = [triton.Config({"BLOCK": block}) for block in BLOCKS]
        tuned = triton.autotune(configs, key=["size"], restore_value=["x"], do_bench=self._bench)
        self.tuner = tuned(add_one)
        self.tuner.cache_results &= keep

    def _launch(self, x: Number, _size: int, BLOCK: int, **_options: object) -> None:
        x.value += 1
        self.used.append(BLOCK)

    def _bench(self, call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        call()
        block = self.used[-1]
        self.measure()
        self.measured += 1
        return [float(abs(block - BEST))] * len(quantiles)

    def __call__(self, x: Number, size: int = 1) -> None:
        self.tuner.run(x, size, grid=(1,), warmup=False)


def in_threads(work: Callable[[int], object], count: int = THREADS) -> list[Exception]:
    """Runs work(i) in so many threads that begin together; what they raised."""
    errors: list[Exception] = []
    together = threading.Barrier(count)

    def body(i: int) -> None:
        together.wait(DEADLINE)
        try:
            work(i)
        except Exception as error:  # noqa: BLE001 - any kind is what the tests look for
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a call hangs"
    return errors


def take_time() -> None:
    """As long as the thread likes, so that one ends while others measure."""
    time.sleep(0.001 + 0.0005 * (threading.get_native_id() % THREADS))


def tune_together() -> tuple[Kernel, list[Number], list[Exception]]:
    """A cold kernel that all threads call at once, each with a number of its own: 0, 100, 200, …"""
    kernel = Kernel(take_time)
    numbers = [Number(100 * i) for i in range(THREADS)]
    errors = in_threads(lambda i: kernel(numbers[i]))
    return kernel, numbers, errors


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guard changes is put back after the test."""
    for owner, name in ((Autotuner, "run"), (Autotuner, "check_disk_cache"), (CompiledKernel, "run")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(Autotuner, "nargs", None, raising=False)
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "")
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING")


@pytest.fixture
def guarded(untouched: None) -> None:  # noqa: ARG001 - a fixture, for its effect
    """Triton with the guard, for one test."""
    autotune.make_thread_safe()
    run = Autotuner.run
    autotune.make_thread_safe()
    assert Autotuner.run is run  # once is enough


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Triton believes in a GPU, number 99, and keeps its cache in tmp_path."""
    made_up = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 99,
        launcher_cls=lambda _source, _metadata: print,
        utils=SimpleNamespace(get_device_properties=lambda _device: {"max_shared_mem": 1 << 17}),
    )
    monkeypatch.setattr(driver, "_active", made_up)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return made_up


def test_unguarded_threads_that_tune_one_kernel_crash() -> None:
    errors = []
    for _ in range(20):
        errors += tune_together()[2]
    assert errors, "Triton's autotuner is thread-safe by itself now: the guard can go"
    assert any("'NoneType' object is not a mapping" in str(error) for error in errors), errors


@pytest.mark.usefixtures("guarded")
def test_guarded_threads_tune_once_and_each_keeps_its_own_arguments() -> None:
    for _ in range(20):
        kernel, numbers, errors = tune_together()
        assert errors == []
        assert [number.value for number in numbers] == [100 * i + 1 for i in range(THREADS)]
        assert kernel.measured == len(BLOCKS)
        assert kernel.used[len(BLOCKS) :] == [BEST] * THREADS


@pytest.mark.usefixtures("guarded")
def test_guarded_threads_tune_several_shapes_of_several_kernels() -> None:
    kernels = [Kernel(take_time) for _ in range(2)]

    def work(i: int) -> None:
        for size in range(6):
            number = Number(i)
            kernels[(i + size) % 2](number, size // 2)
            assert number.value == i + 1

    assert in_threads(work) == []
    assert [kernel.measured for kernel in kernels] == [3 * len(BLOCKS)] * 2


@pytest.mark.usefixtures("guarded")
def test_a_tuned_shape_runs_while_another_thread_tunes() -> None:
    tuning, go_on = threading.Event(), threading.Event()
    kernel = Kernel()
    kernel(Number(0), size=1)

    def measure() -> None:
        tuning.set()
        assert go_on.wait(DEADLINE), "the call of a tuned shape waits for the tuning"

    kernel.measure = measure

    def work(i: int) -> None:
        number = Number(100 * i)
        if i == 0:
            kernel(number, size=2)
        else:
            assert tuning.wait(DEADLINE)
            kernel(number, size=1)
            go_on.set()
        assert number.value == 100 * i + 1

    assert in_threads(work, 2) == []


@pytest.mark.usefixtures("guarded")
def test_a_call_inside_of_a_measurement_leaves_it_its_arguments() -> None:
    kernel = Kernel()
    kernel(Number(0), size=1)
    kernel.measure = lambda: kernel(Number(0), size=1)
    number = Number(7)
    kernel(number, size=2)
    assert number.value == 8


@pytest.mark.usefixtures("guarded")
def test_a_tuning_that_fails_leaves_the_next_to_another_thread() -> None:
    failures = [RuntimeError("out of memory")]

    def measure() -> None:
        if failures:
            raise failures.pop()

    kernel = Kernel(measure)
    assert [str(error) for error in in_threads(lambda i: kernel(Number(i)))] == ["out of memory"]
    assert kernel.measured == len(BLOCKS)


@pytest.mark.usefixtures("guarded", "gpu")
def test_a_restart_reads_the_results_from_the_disk() -> None:
    first, second = Kernel(keep=True), Kernel(keep=True)
    first(Number(0))
    second(Number(0))
    assert (first.measured, second.measured) == (len(BLOCKS), 0)
    assert second.used == [BEST]


@pytest.mark.usefixtures("guarded", "gpu")
def test_torn_results_cost_a_tuning_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Kernel(keep=True)(Number(0))
    (kept,) = tmp_path.glob("*/*.autotune.json")
    kept.write_text(kept.read_text()[:20])
    kernel = Kernel(keep=True)
    kernel(Number(0))
    assert kernel.measured == len(BLOCKS)
    assert kernel.used[-1] == BEST
    (line,) = capsys.readouterr().err.splitlines()
    assert "tuning of kernel add_one cannot be read or kept" in line
    assert str(tmp_path) in line


def load_together(gpu: SimpleNamespace) -> list[object]:
    """What each of the threads that launch one compiled kernel for the first time finds loaded."""

    def load_binary(*_arguments: object) -> tuple[object, ...]:
        time.sleep(0.05)
        return "module", "function", 1, 0, 1024

    gpu.utils.load_binary = load_binary
    kernel = object.__new__(CompiledKernel)
    kernel.module = kernel.function = kernel._run = None
    kernel.name = kernel.src = kernel.kernel = kernel.hash = kernel.metadata_group = ""
    kernel.metadata = SimpleNamespace(shared=0, num_warps=4, warp_size=32)
    found: list[object] = []

    def launch(i: int) -> None:
        time.sleep(0.01 * i)
        launcher, function = kernel.run, kernel.function
        assert launcher is print
        found.append(function)

    assert in_threads(launch) == []
    kernel.module = None  # there is nothing to unload
    return found


def test_an_unguarded_thread_launches_what_another_is_loading(gpu: SimpleNamespace) -> None:
    assert None in load_together(gpu)


@pytest.mark.usefixtures("guarded")
def test_a_guarded_thread_waits_for_what_another_is_loading(gpu: SimpleNamespace) -> None:
    assert load_together(gpu) == ["function"] * THREADS


@pytest.mark.usefixtures("untouched")
def test_a_triton_of_another_build_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: object, *_args: object) -> None:
        del self

    monkeypatch.setattr(Autotuner, "run", run)
    autotune.make_thread_safe()
    assert Autotuner.run is run
    (line,) = capsys.readouterr().err.splitlines()
    assert f"triton {triton.__version__} is not built as" in line
    assert "`self.nargs =`" in line
    monkeypatch.delattr(Autotuner, "check_disk_cache")
    autotune.make_thread_safe()
    assert "check_disk_cache" in capsys.readouterr().err


@pytest.mark.usefixtures("untouched")
def test_without_triton_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Autotuner.run
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    autotune.make_thread_safe()
    assert Autotuner.run is before
    assert capsys.readouterr().err == ""
