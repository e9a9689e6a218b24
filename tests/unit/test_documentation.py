"""What is documented is so: the examples in the docstrings, and the codes of findings in the manual."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import dflash_agent
import dflash_trainer
import pytest

MODULES = [
    module.name
    for package in (dflash_agent, dflash_trainer)
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    if not module.name.endswith(("__main__", ".mainloop", ".service", ".watcher"))  # those need the bus's libraries
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    tried = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert tried >= 10


MANUALS = sorted((Path(__file__).parents[2] / "docs/man").iterdir())


def codes() -> Iterator[str]:
    """Every code that the agent gives a finding that is not only good news."""
    for path in Path(dflash_agent.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="Finding"),
                    args=[ast.Constant(value=str(code)), severity, *_],
                ) if not (isinstance(severity, ast.Constant) and severity.value == "ok"):
                    yield code


def test_every_code_of_a_finding_is_in_the_manual() -> None:
    manual = next(manual for manual in MANUALS if manual.name == "dflashctl.8").read_text().replace("\\-", "-")
    described = manual[manual.index(".SH FINDINGS") : manual.index(".SH EXIT STATUS")]
    missing = {code for code in codes() if code not in described}
    assert len(set(codes())) > 15
    assert not missing


@pytest.mark.parametrize("manual", MANUALS, ids=lambda manual: manual.name)
def test_the_manual_is_rendered_without_a_warning(manual: Path) -> None:
    done = subprocess.run(
        ["man", "--warnings", "--encoding=UTF-8", "--troff-device=utf8", "--ditroff", "--local-file", manual],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
