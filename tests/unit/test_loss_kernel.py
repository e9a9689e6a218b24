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
for vocabulary, dtype, scale, (multiplier, cap), distill in json.loads(sys.argv[1]):
    logits, taught = (torch.randn(2, 5, vocabulary) * scale).to(getattr(torch, dtype))
    labels = torch.randint(vocabulary, (5,))
    labels[0] = logits[0].argmax()
    logits[1, labels[1]] = logits[1].max()  # two are greatest: the first counts
    logits[2] = logits[2, 0]  # all are
    labels[2] = 0
    shapes = loss.LogitShape(multiplier, cap), loss.LogitShape(0.8, 5.0)
    words = labels, shapes[0], distill, taught if distill else None, shapes[1]
    plain, ours = logits.clone(), logits.clone()
    expected = loss.logits_to_gradient(plain, *words)
    found = loss_kernel.logits_to_gradient(ours, *words)
    for theirs, own in zip(expected[:2], found[:2]):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.float(), plain.float(), rtol=1e-2 if dtype == "bfloat16" else 1e-4, atol=1e-6)
    seen.append(torch.equal(found[2], expected[2]) and bool(found[2][0]) and bool(found[2][2]))
print(json.dumps(seen))
"""


@pytest.mark.parametrize("type_of_logits", ["*bf16", "*fp32"])
@pytest.mark.parametrize("variant", [(False, False, False), (True, True, True)])
def test_kernel_compiles_for_a_gpu(type_of_logits: str, variant: tuple[bool, ...]) -> None:
    triton = pytest.importorskip("triton")
    compiler, target = (
        importlib.import_module("triton.compiler"),
        importlib.import_module("triton.backends.compiler"),
    )
    kernel = importlib.import_module("dflash_trainer.loss_kernel")
    pointers = {"logits": type_of_logits, "taught": type_of_logits, "labels": "*i64", "correct": "*i1"}
    pointers |= {"losses": "*fp32", "nats": "*fp32"}
    numbers = dict.fromkeys(("multiplier", "cap", "taught_multiplier", "taught_cap", "distill"), "fp32")
    fixed = dict(zip(("capped", "taught_capped", "distilling"), variant, strict=True)) | {"columns": kernel.COLUMNS}
    kinds = pointers | numbers | {"vocabulary": "i32"} | dict.fromkeys(fixed, "constexpr")
    names = kernel._loss_kernel.arg_names
    source = compiler.ASTSource(
        fn=kernel._loss_kernel, signature={name: kinds[name] for name in names}, constexprs=fixed
    )
    made = triton.compile(source, target=target.GPUTarget("cuda", 90, 32), options={"num_warps": kernel.WARPS})
    assert made.asm["cubin"]


def test_kernel_and_plain_form_agree_whatever_the_vocabulary() -> None:
    pytest.importorskip("triton")
    plain = (1.0, 0.0)
    cases = [
        (64, "float32", 1, plain, 0.0),
        (65, "float32", 1, plain, 0.3),
        (1000, "float32", 30, plain, 0.0),
        (1000, "float32", 30, plain, 1.0),
        (7, "float32", 1, (0.5, 0.0), 0.5),
        (1000, "bfloat16", 3, plain, 0.0),
        (1000, "bfloat16", 3, (1.5, 4.0), 0.5),
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
