# SPDX-License-Identifier: Apache-2.0
"""The source of vLLM's functions, read from its files: nothing of vLLM is imported to decide."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from importlib import metadata
from pathlib import Path

from dflash.integrations.vllm.known import Part


def find_vllm() -> tuple[Path, str]:
    """The folder that holds the package vllm, and its version without the build's suffix."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not a package here")
    root = Path(next(iter(spec.submodule_search_locations))).parent
    return root, metadata.version("vllm").partition("+")[0]


def source_hash(root: Path, function: str) -> str | None:
    """16 hexadecimal digits of the SHA-256 of a definition, decorators included; None where there is none.

    Args:
        root: the folder that holds the package.
        function: "package.module:Class.function".
    """
    module, _, path = function.partition(":")
    file = root / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    body = ast.parse(text).body
    node = None
    for name in path.split("."):
        named = (
            n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name
        )
        node = next(named, None)
        if node is None:
            return None
        body = node.body
    assert node is not None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def reason_to_leave(root: Path, version: str, part: Part) -> str | None:
    """Why the part of this version of vLLM in `root` is not taken over; None where it is."""
    if version in part.left:
        return part.left[version]
    known = part.versions.get(version)
    if known is None:
        return f"vLLM {version} is not known, only {', '.join(part.versions)}"
    functions = known.functions.items()
    unknown = [name for name, expected in functions if source_hash(root, name) != expected]
    return f"not the source we know: {', '.join(unknown)}" if unknown else None
