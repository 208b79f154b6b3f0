"""Triton kernels compiled ahead of time, and their machine code read; no GPU is needed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_launch(launch: tuple, architecture: int):
    """A launch that was caught before the driver: kernel, arguments, options."""
    kernel, args, options = launch
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, rest, bound, specialization, rest
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def read_code(kernel, *command: str) -> str:
    """What a tool that comes with triton says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = [str(_TOOLS / command[0]), *command[1:], file.name]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout
