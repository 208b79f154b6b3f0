"""Triton kernels compiled ahead of time, and their machine code read; no GPU is needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

#: KiB of shared memory that a program may have, by architecture.
SHARED = {89: 99, 90: 227, 100: 227, 120: 99}
#: What multiplies FP8 codes: of few rows and of many the same kind, and 32 columns of K at a time.
FP8_PRODUCTS = {
    89: r"\bQMMA\.16832\.F32\.E4M3\.E4M3\b",
    90: r"\bQGMMA\.64x\d+x32\.F32\.E4M3\.E4M3\b",
    100: r"\bUTCQMMA\b",
    120: r"\bQMMA\.16832\.F32\.E4M3\.E4M3\b",
}

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


def refuse_spills(kernel, architecture: int) -> None:
    """Assert that a compiled kernel keeps everything in registers and shared memory."""
    usage = read_code(kernel, "cuobjdump", "--dump-resource-usage")
    stack, local = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage).groups()
    assert (stack, local) == ("0", "0")
    assert not re.search(r"\b(STL|LDL)\b", read_code(kernel, "nvdisasm", "-c"))
    assert kernel.metadata.shared <= SHARED[architecture] * 1024
