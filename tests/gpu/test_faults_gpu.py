"""Ways in which a training dies on a real GPU, and how it comes back; prints how long that took.

Needs a booted node with the packages and a runtime for GPUs, as test_preflight_gpu.py does.
"""

import re
import time

from container import Machine
from system.node import journal, make_run, show, start, wait_for
from system.test_faults import drop_in, faulty
from system.test_training import step_of

# Once, at step 50, something on the GPU that does not end, or that must not be.
ONCE = """
        import torch
        mark = os.environ["CACHE_DIRECTORY"] + "/done"
        if step == 50 and not os.path.exists(mark):
            open(mark, "w").close()
            {}
"""
STUCK = ONCE.replace("{}", "torch.cuda._sleep(1 << 62)")
OUT_OF_BOUNDS = ONCE.replace("{}", "torch.zeros(4, device='cuda')[torch.tensor([99], device='cuda')]")


def trains_again(node: Machine, unit: str, before: int) -> float:
    """Waits for the attempt after `before` restarts to train; seconds from now."""
    begin = time.monotonic()
    wait_for(lambda: int(show(node, unit, "NRestarts")) > before, 180, "the restart")
    wait_for(lambda: show(node, unit, "ActiveState") == "active", 180, "the first step")
    return time.monotonic() - begin


def long_run(node: Machine, name: str) -> str:
    return make_run(node, name, max_steps=1_000_000, save_interval=20, log_interval=10, head_dim=64, devices="0")


def comes_back(node: Machine, name: str, fault: str, *words: str) -> str:
    """What is in the journal of a run that meets a fault once and trains again; prints the lines with the words."""
    made = long_run(node, name)
    with drop_in(node, made, faulty(node, fault)):
        start(node, made)
        took = trains_again(node, made, 0)
        told = journal(node, made)
    print(f"\n{name}: trains again {took:.1f} s after its start")
    print("\n".join(line for line in told.splitlines() if any(word in line for word in words)))
    assert "resuming from" in told
    return told


def test_a_kernel_that_does_not_end_is_a_hang_and_the_run_goes_on(node: Machine) -> None:
    told = comes_back(node, "stuck", STUCK, "watchdog", "memory of")
    assert "ended by the watchdog: no step was done" in told
    assert "in step" in told  # where the main thread waits for the GPU


def test_an_error_of_a_kernel_is_named_in_cudas_words_and_the_run_goes_on(node: Machine) -> None:
    told = comes_back(node, "bounds", OUT_OF_BOUNDS, "the GPU failed", "Xid")
    assert re.search("the GPU failed: CUDA (driver )?error: device-side assert triggered", told)


def test_a_stop_while_the_first_step_compiles_is_no_failure_and_saves(node: Machine) -> None:
    made = long_run(node, "compiles")
    node.run("systemctl", "start", "--no-block", made)
    wait_for(lambda: "first step under way" in show(node, made, "StatusText"), 120, "the first step")
    begin = time.monotonic()
    node.run("systemctl", "stop", made)
    print(f"\na stop in the first step: {time.monotonic() - begin:.1f} s")
    assert show(node, made, "Result") == "success"
    assert "stopped at step 1/" in journal(node, made)
    assert "whole" in node.run("dflashctl", "checkpoints", "compiles").stdout


def test_kills_one_after_the_other_are_restarts_with_back_off(node: Machine) -> None:
    made = long_run(node, "killed")
    start(node, made)
    for number in range(3):
        at = step_of(node, "killed")
        wait_for(lambda at=at: step_of(node, "killed") > at + 40, 60, "more steps")  # type: ignore[misc]
        node.run("systemctl", "kill", "--kill-whom=all", "--signal=SIGKILL", made)
        print(f"\nkill {number + 1}: trains again after {trains_again(node, made, number):.1f} s", end="")
    told = journal(node, made)
    print("\n" + "\n".join(line for line in told.splitlines() if "killed by" in line or "restart" in line))
    assert told.count("resuming from") == 3
    node.run("systemctl", "stop", made)
    assert show(node, made, "Result") == "success"
    print(node.run("dflashctl", "explain", "killed").stdout)
