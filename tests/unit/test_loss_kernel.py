"""The Triton kernel of the loss against its plain form, run by Triton's interpreter in another process."""

import importlib
import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch
from dflash_trainer import loss, loss_kernel

loss_kernel.COLUMNS = 64
torch.manual_seed(0)
seen = []
for vocabulary, dtype, scale in json.loads(sys.argv[1]):
    logits = (torch.randn(5, vocabulary) * scale).to(getattr(torch, dtype))
    labels = torch.randint(vocabulary, (5,))
    labels[0] = logits[0].argmax()
    logits[1, labels[1]] = logits[1].max()  # two are greatest: the first counts
    logits[2] = logits[2, 0]  # all are
    labels[2] = 0
    weights = torch.tensor([1.0, 0.5, 0.25, 0.0, 2.0])
    plain, ours = logits.clone(), logits.clone()
    expected = loss.logits_to_gradient(plain, labels, weights)
    found = loss_kernel.logits_to_gradient(ours, labels, weights)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.float(), plain.float(), rtol=1e-2 if dtype == "bfloat16" else 1e-4, atol=1e-6)
    seen.append(torch.equal(found[1], expected[1]) and bool(found[1][0]) and bool(found[1][2]))
print(json.dumps(seen))
"""


@pytest.mark.parametrize("type_of_logits", ["*bf16", "*fp32"])
def test_kernel_compiles_for_a_gpu(type_of_logits: str) -> None:
    triton = pytest.importorskip("triton")
    compiler, target = (
        importlib.import_module("triton.compiler"),
        importlib.import_module("triton.backends.compiler"),
    )
    kernel = importlib.import_module("dflash_trainer.loss_kernel")
    names = {"logits": type_of_logits, "labels": "*i64", "weights": "*fp32", "losses": "*fp32", "correct": "*i1"}
    source = compiler.ASTSource(
        fn=kernel._softmax_kernel,
        signature=names | {"vocabulary": "i32", "columns": "constexpr"},
        constexprs={"columns": kernel.COLUMNS},
    )
    made = triton.compile(source, target=target.GPUTarget("cuda", 90, 32), options={"num_warps": kernel.WARPS})
    assert made.asm["cubin"]


def test_kernel_and_plain_form_agree_whatever_the_vocabulary() -> None:
    pytest.importorskip("triton")
    cases = [
        (64, "float32", 1),
        (65, "float32", 1),
        (1000, "float32", 30),
        (7, "float32", 1),
        (1000, "bfloat16", 3),
    ]
    paths = os.pathsep.join(path for path in sys.path if path.endswith(("agent", "trainer")))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [True] * len(cases)
