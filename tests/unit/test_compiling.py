"""Target and drafter compile in threads of their own: what one traces is none of the other's business."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from dflash_trainer import compiling
from torch import Tensor, fx, nn

DEADLINE = 60


class Doubling(nn.Module):
    """Its parameter is asked for through nn.Module's __getattr__, which a trace replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def while_traced(work: Callable[[], object]) -> tuple[fx.Graph, list[object]]:
    """The graph of a function, and what work() came to that another thread did in the middle of its trace."""
    found: list[object] = []

    def body() -> None:
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    def traced(x: Tensor) -> Tensor:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the other thread waits for the trace"
        return x + 1

    return fx.Tracer().trace(traced), found


def test_unguarded_a_trace_breaks_what_another_thread_has_compiled() -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import torch
from unit.test_compiling import while_traced
double = torch.compile(lambda x: x * 2, backend="eager")
_, [error] = while_traced(lambda: double(torch.ones(2)))
assert "symbolically trace a dynamo-optimized function" in str(error), error
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)


def test_while_one_thread_traces_another_runs_its_modules() -> None:
    compiling.make_tracing_thread_safe()
    module = Doubling()
    compiled = torch.compile(module, backend="eager")
    compiled(torch.ones(2))
    graph, found = while_traced(lambda: (module(torch.ones(2)), compiled(torch.ones(2))))
    ((plain, fast),) = found  # type: ignore[misc]
    assert plain.tolist() == fast.tolist() == [2.0, 2.0]
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]


def test_another_thread_compiles_when_the_trace_is_done_and_sees_nothing_of_it() -> None:
    compiling.make_tracing_thread_safe()
    methods = nn.Module.__call__, nn.Module.__getattr__
    seen, results = [], []

    def backend(graph: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        seen.append((nn.Module.__call__, nn.Module.__getattr__))
        return graph.forward

    compiled = torch.compile(Doubling(), backend=backend)
    other = threading.Thread(target=lambda: results.append(compiled(torch.ones(2))))

    def traced(x: Tensor) -> Tensor:
        other.start()
        other.join(0.5)
        assert other.is_alive(), "it compiled during the trace"
        return x + 1

    fx.Tracer().trace(traced)
    other.join(DEADLINE)
    assert [result.tolist() for result in results] == [[2.0, 2.0]]
    assert seen == [methods]


def test_two_threads_that_trace_get_a_graph_each_and_leave_modules_as_they_were() -> None:
    compiling.make_tracing_thread_safe()
    before = nn.Module.__call__, nn.Module.__getattr__
    graphs: list[fx.Graph] = []
    start = threading.Barrier(4, timeout=DEADLINE)

    def work() -> None:
        start.wait()
        for _ in range(20):
            graphs.append(fx.Tracer().trace(nn.Sequential(Doubling(), nn.ReLU())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert [len(graph.nodes) for graph in graphs] == [len(graphs[0].nodes)] * 80
    assert (nn.Module.__call__, nn.Module.__getattr__) == before


def test_the_thread_that_traces_is_still_told_that_compiled_code_cannot_be_traced() -> None:
    compiling.make_tracing_thread_safe()
    double = torch.compile(lambda x: x * 2, backend="eager")
    with pytest.raises(RuntimeError, match="symbolically trace a dynamo-optimized function"):
        fx.Tracer().trace(lambda x: double(x) + 1)


def test_a_torch_built_otherwise_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def trace(_self: object) -> None:
        """Another one."""

    monkeypatch.setattr(fx.Tracer, "trace", trace)
    compiling.make_tracing_thread_safe()
    assert fx.Tracer.trace is trace
    assert "not built as the guard of tracing expects" in capfd.readouterr().err
