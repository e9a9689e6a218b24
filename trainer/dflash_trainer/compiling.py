"""torch.compile as the layers of target and drafter use it, each in a thread of its own."""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from dflash_trainer.journal import WARNING, log

RECOMPILE_LIMIT = (
    64  # torch's own is 8; beyond it a function runs uncompiled, and FlexAttention holds all scores then
)
BUILT_AS = ("_is_fx_tracing_flag = True", "patcher.patch_method(")  # what the guard of tracing hangs on


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled when first called, for any size; one row, one tile of queries and the like are cases of their own.

    Layers whose forward is one piece of code share what was compiled for the first of them.
    """
    import torch._dynamo as dynamo  # a second or two, and nothing without a GPU needs it

    make_tracing_thread_safe()
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    # What it recommends would round the angles of positions; the large products are of bfloat16 anyway.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    result: Callable[..., Any] = torch.compile(function, dynamic=True)
    return result


class _Thread(threading.local):
    """Of one thread: how many traces it is inside of."""

    traces = 0


_thread = _Thread()


def make_tracing_thread_safe() -> None:
    """Has a trace by torch.fx, of which compiling makes many, concern the thread that traces and no other.

    torch (2.11 to 2.13) sets a flag and replaces nn.Module's methods for the whole process meanwhile: the target's
    forward fails, or gets into the graph, if the drafter's layers are compiled for another size just then. What is
    compiled already runs on in other threads; they compile when the trace is done. A torch built otherwise is left
    alone, with a warning.
    """
    from torch.fx import _symbolic_trace as fx

    tracer: Any = fx.Tracer
    patcher: Any = getattr(fx, "_Patcher", None)
    if hasattr(tracer.trace, "of_one_thread"):
        return
    source = inspect.getsource(tracer.trace)
    lacking = ", ".join(f"`{words}`" for words in BUILT_AS if words not in source)
    if lacking or not hasattr(patcher, "patch_method") or not hasattr(fx, "is_fx_symbolic_tracing"):
        log(
            f"torch {torch.__version__} is not built as the guard of tracing expects ({lacking or '_Patcher'}): "
            f"compiling may fail while target and drafter run; install the locked runtime",
            event="compiling",
            priority=WARNING,
        )
        return
    tracer.trace = _counted(tracer.trace)
    patcher.patch_method = _for_this_thread(patcher.patch_method)
    # Read by torch.compile's wrapper whenever it is called.
    fx.is_fx_symbolic_tracing = _if_this_thread_traces(fx.is_fx_symbolic_tracing)


def _counted(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Tracer.trace, while no other thread traces or compiles.

    Two traces would take back each other's replacements, and what Dynamo sees of them, it compiles.
    """
    from torch._dynamo.convert_frame import compile_lock

    @functools.wraps(trace)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with compile_lock:
            _thread.traces += 1
            try:
                return trace(*args, **kwargs)
            finally:
                _thread.traces -= 1

    counted.of_one_thread = True  # type: ignore[attr-defined]
    return counted


def _for_this_thread(patch_method: Callable[..., None]) -> Callable[..., None]:
    """_Patcher.patch_method: other threads get the method that was there before."""

    @functools.wraps(patch_method)
    def patch(patcher: Any, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> None:
        before, owner = getattr(cls, name), threading.get_ident()

        @functools.wraps(new)
        def method(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == owner else before)(*args, **kwargs)

        patch_method(patcher, cls, name, method, deduplicate)

    return patch


def _if_this_thread_traces(is_tracing: Callable[[], bool]) -> Callable[[], bool]:
    """is_fx_symbolic_tracing: not because of another thread's trace."""

    @functools.wraps(is_tracing)
    def this_thread_traces() -> bool:
        return _thread.traces > 0 and is_tracing()

    return this_thread_traces
