"""Makes Triton's autotuner fit for several threads, and lets its results outlive the process.

Triton (3.6 to 3.9) leaves a call's arguments, and what its tuning works with, on the kernel object, which all
threads share (triton issue 11494). flash-linear-attention's kernels are of a subclass that ends in the same `run`.
"""

import functools
import importlib.util
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from dflash_trainer.journal import WARNING, log

Method = Callable[..., Any]
BUILT_AS = ("self.nargs =", "not in self.cache:", "self.function, self.n_regs")  # what the guards hang on

# One lock for all kernels: no measurement is disturbed by other tuning. Targets tune the same kernels in the same
# order, so with a lock for each they would wait as long.
_tuning = threading.RLock()


class _Thread(threading.local):
    """Of one thread: its calls' arguments by kernel; whether its innermost call has the lock (None: no call)."""

    def __init__(self) -> None:
        self.nargs: dict[int, Any] = {}
        self.tunes: bool | None = None


_thread = _Thread()


class _Nargs:
    """`Autotuner.nargs`, of which each thread sees its own."""

    def __get__(self, kernel: Any, _owner: type) -> Any:
        return _thread.nargs.get(id(kernel))

    def __set__(self, kernel: Any, value: Any) -> None:
        if value is None:
            _thread.nargs.pop(id(kernel), None)
        else:
            _thread.nargs[id(kernel)] = value


class _Results(dict[Any, Any]):
    """`Autotuner.cache`. A call that misses its key has the lock until it ends; with the lock it looks again."""

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key) or _thread.tunes is not False:
            return super().__contains__(key)
        _tuning.acquire()
        if super().__contains__(key):
            _tuning.release()
            return True
        _thread.tunes = True
        return False


def make_thread_safe() -> None:
    """Guards all autotuned kernels; to be called before any is imported. Does nothing without Triton.

    A call whose shape is tuned takes no lock; others tune one after another. Results are kept under
    TRITON_CACHE_DIR, unless TRITON_CACHE_AUTOTUNING is 0. A Triton built otherwise is left alone, with a warning.
    """
    if importlib.util.find_spec("triton") is None:
        return
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    triton: Any = importlib.import_module("triton")
    try:
        tuner, compiled = triton.runtime.autotuner.Autotuner, triton.compiler.compiler.CompiledKernel
        if isinstance(vars(tuner).get("nargs"), _Nargs):
            return
        guards = _guarded(tuner.run), _forgiving(tuner.check_disk_cache), property(_whole(compiled.run.fget))
        source = inspect.getsource(tuner.run) + inspect.getsource(compiled)
        lacking = ", ".join(f"`{words}`" for words in BUILT_AS if words not in source)
    except (AttributeError, OSError) as error:
        lacking = str(error)
    if lacking:
        log(
            f"triton {triton.__version__} is not built as the guard of its autotuner expects ({lacking}): several "
            f"targets in a process may fail; install the locked runtime",
            event="autotune",
            priority=WARNING,
        )
        return
    tuner.nargs = _Nargs()
    tuner.run, tuner.check_disk_cache, compiled.run = guards


def _guarded(run: Method) -> Method:
    """Autotuner.run: the arguments are the thread's own, and one thread tunes at a time."""

    @functools.wraps(run)
    def guarded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if type(kernel.cache) is not _Results:
            with _tuning:
                if type(kernel.cache) is not _Results:
                    kernel.cache = _Results(kernel.cache)
        outer = _thread.tunes, kernel.nargs
        _thread.tunes = False
        try:
            return run(kernel, *args, **kwargs)
        finally:
            if _thread.tunes:
                _tuning.release()
            _thread.tunes, kernel.nargs = outer

    return guarded


def _forgiving(check: Method) -> Method:
    """Autotuner.check_disk_cache: a torn file, a full disk or a key that JSON cannot hold costs a new tuning."""

    def forgiving(kernel: Any, key: Any, configs: Any, benchmark: Callable[[], None]) -> Any:
        try:
            return check(kernel, key, configs, benchmark)
        except (OSError, TypeError, ValueError) as error:
            directory = os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
            log(
                f"tuning of kernel {kernel.base_fn.__name__} cannot be read or kept: {error}; if this comes at "
                f"every start, empty {directory}",
                event="autotune",
                priority=WARNING,
            )
        if key not in kernel.cache:
            benchmark()
        return False

    return forgiving


def _whole(run: Method) -> Method:
    """CompiledKernel.run: a thread waits while another loads the kernel to the GPU, which sets `function` last."""

    def whole(kernel: Any) -> Any:
        if kernel.function is not None:
            return run(kernel)
        with _tuning:
            return run(kernel)

    return whole
