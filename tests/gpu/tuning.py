"""tuning.py (own | fla) (guarded | unguarded): autotuned kernels in several threads at once; prints a line of JSON.

The kernels are one of this file's own, or those of flash-linear-attention that a Qwen3.5 target runs.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,no-untyped-call"

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from dflash_trainer import autotune
from torch import Tensor
from triton.runtime.autotuner import Autotuner

THREADS = 6
SIZES = (1, 2, 3)
Work = Callable[[int, torch.device], Tensor]  # what a size gives, on a device; the same each time
if sys.argv[2] == "guarded":
    autotune.make_thread_safe()  # before any kernel is made


@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256, 512, 1024) for w in (2, 4)],
    key=["size"],
    restore_value=["y_ptr"],
)
@triton.jit
def add_to(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(y_ptr + at, mask=inside) + tl.load(x_ptr + at, mask=inside)
    tl.store(y_ptr + at, total, mask=inside)


def add(size: int, device: torch.device) -> Tensor:
    """x added to y, once."""
    count = size << 16
    x, y = torch.arange(count, device=device, dtype=torch.float32), torch.ones(count, device=device)
    add_to[lambda meta: (triton.cdiv(count, meta["BLOCK"]),)](x, y, count)
    return y


def delta_rule(size: int, device: torch.device) -> Tensor:
    """The convolution and the gated delta rule of one layer."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    random = torch.Generator(device).manual_seed(size)
    heads, width, length = 2 * size, 128, 512

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    mixed = normal(2, length, 3 * heads * width)
    mixed, _ = causal_conv1d(mixed, weight=normal(3 * heads * width, 4) / 2, activation="silu")
    q, k, v = mixed.view(2, length, 3, heads, width).unbind(2)
    decay = torch.nn.functional.logsigmoid(normal(2, length, heads, dtype=torch.float32))
    beta = normal(2, length, heads).sigmoid()
    out, _ = chunk_gated_delta_rule(
        q.contiguous(), k.contiguous(), v.contiguous(), decay, beta, use_qk_l2norm_in_kernel=True
    )
    return out


def count_measurements() -> list[str]:
    """A list that grows by a kernel's name whenever a configuration of it is measured."""
    measured: list[str] = []
    measure = Autotuner._bench

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        measured.append(kernel.base_fn.__name__)
        return measure(kernel, *args, **kwargs)

    Autotuner._bench = counted
    return measured


def in_threads(work: Work) -> tuple[list[str], dict[tuple[int, int], Tensor]]:
    """Runs every size in each thread, on a GPU and a stream of its own; the errors, and the last results."""
    errors: list[str] = []
    results: dict[tuple[int, int], Tensor] = {}
    together = threading.Barrier(THREADS)

    @torch.no_grad()
    def body(i: int) -> None:
        device = torch.device("cuda", i % torch.cuda.device_count())
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                torch.ones(1, device=device).sum().item()
                together.wait(60)
                for size in (*SIZES, *SIZES):
                    results[i, size] = work(size, device)
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # noqa: BLE001 - any kind is what this looks for
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])

    threads = [threading.Thread(target=body, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, results


def right(result: Tensor, work: Work, size: int) -> bool:
    """Whether one thread alone gets the same, now that all is tuned."""
    with torch.cuda.device(result.device):
        return torch.allclose(result.float(), work(size, result.device).float(), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def main() -> None:
    work = {"own": add, "fla": delta_rule}[sys.argv[1]]
    if sys.argv[1] == "fla":  # the imports are not what is tested
        import fla.modules.causal_conv1d
        import fla.ops.gated_delta_rule  # noqa: F401
    measured = count_measurements()
    began = time.monotonic()
    errors, results = in_threads(work)
    row: dict[str, Any] = {
        "errors": errors,
        "measured": len(measured),
        "kernels": sorted(set(measured)),
        "seconds": round(time.monotonic() - began, 2),
    }
    if not errors:
        wrong = [key for key, result in results.items() if not right(result, work, key[1])]
        began = time.perf_counter()
        for _ in range(200):
            work(1, torch.device("cuda", 0))
        row |= {"results": len(results), "wrong": wrong, "warm_us": (time.perf_counter() - began) * 1e6 / 200}
        torch.cuda.synchronize()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
