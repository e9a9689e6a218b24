"""The two ways in which a run ends on purpose, whose exit codes are the contract with the unit; errors of GPUs."""

import sys

EXIT_TRY_AGAIN = 75
EXIT_CANNOT_START = 78
_SIGNS = (
    "CUDA out of memory",  # in what torch.compile makes of it
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
_FAILURES = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "NVML_ERROR", "NCCL error")


class CannotStart(Exception):
    """The run cannot start as configured: exit 78, which the unit does not restart. str() is one line."""


class TryAgain(Exception):
    """Worth another attempt (out of memory, a lost peer, I/O): exit 75. str() is one line."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU's memory does not suffice; does not import torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


def is_of_the_gpu(error: BaseException) -> bool:
    """Whether CUDA or a library on it says that the GPU or the driver failed."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _FAILURES)


def is_compiling(error: BaseException) -> bool:
    """Whether torch.compile could not make sense of a function, with memory enough."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor")) and not is_out_of_memory(error)
