"""The ExecStart of dflash-train@.service: acts on the preflight's verdict, and becomes the trainer.

A refusal is exit 78, which the unit does not restart, or 75, which it does. SIGTERM ends it at once.
"""

import os
import sys

from dflash_agent import leases, preflight, runtime
from dflash_agent.findings import Finding
from dflash_agent.journal import notify, say
from dflash_agent.preflight import EXIT_CANNOT_START, EXIT_RETRY, Verdict
from dflash_agent.runfile import ConfigError, path_of


def main(arguments: list[str] | None = None) -> int:
    """Starts the run that is named, or returns why not. Does not return if it starts."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1:
        print("usage: launch NAME", file=sys.stderr)
        return 2
    name = words[0]
    try:
        path = path_of(name)
    except ConfigError as error:
        return refuse(name, EXIT_CANNOT_START, (Finding("config", "refuse", str(error)),))
    verdict = preflight.read(name)
    if verdict is None or verdict.invocation != os.environ.get("INVOCATION_ID", ""):
        text = "there was no preflight for this start"
        hint = f"a run is started with: systemctl start dflash-train@{name}"
        return refuse(name, EXIT_CANNOT_START, (Finding("config", "refuse", text, hint),))
    if verdict.exit_code:
        return refuse(name, verdict.exit_code, verdict.findings)
    if verdict.complete:
        notify("READY=1\nSTATUS=" + verdict.complete)
        say(name, verdict.complete, DFLASH_EVENT="complete")
        return 0
    kept = leases.kept_here(os.environ)
    for descriptor in kept.values():  # systemd has its own; a child of the trainer must not keep one
        os.close(descriptor)
    missing = [uuid for uuid in verdict.gpus if uuid not in kept]
    if missing:
        finding = Finding("gpu-leased", "refuse", f"the lease of {', '.join(missing)} was lost")
        return refuse(name, EXIT_RETRY, (finding,))
    directory = runtime.current()
    if directory is None:  # removed since the checks
        finding = Finding("runtime-missing", "refuse", "the runtime is gone", "sudo dflashctl runtime install")
        return refuse(name, EXIT_CANNOT_START, (finding,))
    python = directory / "bin" / "python"
    notify("STATUS=starting the trainer")
    command = [str(python), "-m", "dflash_trainer", "train", "--run-file", str(path)]
    return os.execve(python, command, environment(dict(os.environ), verdict))


def refuse(name: str, code: int, findings: tuple[Finding, ...]) -> int:
    """Says why there is no start, the first reason last: it is what `systemctl status` ends with."""
    notify("STATUS=" + findings[0].line())
    for finding in reversed(findings):
        fields = {"DFLASH_CODE": finding.code, "DFLASH_GPU": finding.gpu, "DFLASH_PID": str(finding.pid or "")}
        given = {key: value for key, value in fields.items() if value}
        say(name, finding.line(), priority=3, DFLASH_EVENT="refused", **given)
    return code


def environment(given: dict[str, str], verdict: Verdict) -> dict[str, str]:
    """The trainer's environment: what the unit or an administrator's drop-in has set wins, but for the GPUs.

    CUDA sees the leased GPUs and no others, in the order of the bus (CUDA C++ programming guide, environment
    variables).
    """
    cache = given.get("CACHE_DIRECTORY", "/var/cache/dflash").split(":")[0]
    passed = {key: value for key, value in given.items() if not key.startswith("LISTEN_")}
    # torch reads the old name too, here before the new one, there after it: never set both.
    allocator = {} if "PYTORCH_CUDA_ALLOC_CONF" in given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {
        **allocator,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        **passed,
        "CUDA_VISIBLE_DEVICES": ",".join(verdict.gpus),
    }


if __name__ == "__main__":
    sys.exit(main())
