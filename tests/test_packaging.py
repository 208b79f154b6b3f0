"""The package's layout: one list of packages, a wheel that imports, imports that point down."""

import ast
import ctypes
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PACKAGES: list[str] = SETUPTOOLS["packages"]
EXTENSION = SETUPTOOLS["ext-modules"][0]

# Lowest first. A layer imports itself and what stands before it. The root and cli import anything.
LAYERS = ("core", "linear", "fusion", "adapters", "policies", "serving")
NOT_PACKAGED = {"benchmarks", "build", "dist", "docs", "examples", "native", "tests"}


def package_folder(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def data_files() -> list[Path]:
    """What is packaged beside modules."""
    return [
        path
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in package_folder(package).glob(pattern)
    ]


def modules_on_disk() -> dict[str, Path]:
    """Every module of the package by its full name."""
    found = {}
    for package in PACKAGES:
        for path in sorted(package_folder(package).glob("*.py")):
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            found[name] = path
    return found


# --- the lists in pyproject.toml


def test_packages_are_the_folders_on_disk():
    on_disk = {"branchline"}
    for folder, subfolders, files in os.walk(ROOT):
        relative = Path(folder).relative_to(ROOT)
        if relative.parts:
            if "__init__.py" in files:
                on_disk.add(".".join(("branchline", *relative.parts)))
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        else:
            subfolders[:] = [
                name
                for name in subfolders
                # A virtual environment of any name; installs leave build and *.egg-info here too.
                if name not in NOT_PACKAGED
                and not name.startswith(".")
                and not name.endswith(".egg-info")
                and not (ROOT / name / "pyvenv.cfg").exists()
            ]
    assert sorted(PACKAGES) == sorted(on_disk)
    assert sorted(PACKAGES) == PACKAGES, "keep the list sorted"


def test_no_module_hides_in_a_folder_that_is_not_packaged():
    for top in {name.split(".")[1] for name in PACKAGES if "." in name}:
        for path in (ROOT / top).rglob("*.py"):
            package = ".".join(("branchline", *path.relative_to(ROOT).parent.parts))
            assert package in PACKAGES, f"{path.relative_to(ROOT)}: its folder has no __init__.py"


def test_root_has_only_init_and_main():
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "__main__.py"]


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_native_sources_and_headers_are_listed():
    """A source that is not listed is not compiled; a header that is not listed goes stale."""
    listed = {"*.c": EXTENSION["sources"], "*.h": EXTENSION["depends"]}
    for pattern, names in listed.items():
        on_disk = [path.relative_to(ROOT).as_posix() for path in (ROOT / "native").rglob(pattern)]
        assert sorted(names) == sorted(on_disk)


def test_native_flags_keep_the_bits():
    flags = EXTENSION["extra-compile-args"]
    assert "-ffp-contract=off" in flags
    forbidden = ("-march*", "-mtune*", "-ffast-math", "-Ofast", "-funsafe*", "-fassociative*")
    assert not [flag for flag in flags if any(fnmatch(flag, bad) for bad in forbidden)]


def test_tools_cover_every_package():
    """Ruff bans, and pyright checks, each top folder of the package."""
    tops = {name.split(".")[1] for name in PACKAGES if "." in name}
    tool = PROJECT["tool"]
    banned = set(tool["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
    assert tops <= banned
    assert {"__init__.py", "__main__.py", *tops} == set(tool["pyright"]["include"])


def test_constraints_pin_every_requirement():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in pins), "exact pins only"
    pinned = [line.split("==")[0] for line in pins]
    assert pinned == sorted(set(pinned)), "keep the list sorted"
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    for requirement in chain(project["dependencies"], *extras):
        name = requirement.split(";")[0].split(">")[0].split("[")[0].strip()
        assert name in {*pinned, "branchline"}, requirement


def test_package_is_imported_once():
    """One copy under one name: pytest must not import the root's __init__.py by its folder's."""
    import branchline

    init = ROOT / "__init__.py"
    copies = [
        name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and Path(file) == init
    ]
    assert copies == ["branchline"]
    assert branchline.__file__ is not None
    assert Path(branchline.__file__) == init


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy: a build leaves files in its source folder."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix not in {".so", ".dylib"}:
            shutil.copy2(path, source)
    tops = {name.split(".")[1] for name in PACKAGES if "." in name}
    for name in tops | NOT_PACKAGED - {"build", "dist"}:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    target = source.parent / "out"
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--disable-pip-version-check", "-w", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=source.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    target = wheel.parent.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def is_native(name: str) -> bool:
    return fnmatch(name, "branchline/_native*")


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        (Path("branchline") / path.relative_to(ROOT)).as_posix()
        for path in modules_on_disk().values()
    }
    expected |= {(Path("branchline") / path.relative_to(ROOT)).as_posix() for path in data_files()}
    assert {name for name in names if not is_native(name)} == expected
    assert len([name for name in names if is_native(name)]) <= 1


def test_wheel_has_licence_and_command(unpacked: Path):
    (info,) = unpacked.glob("*.dist-info")
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "branchline = branchline.cli:main" in (info / "entry_points.txt").read_text()


def test_wheel_has_a_native_library_that_loads(unpacked: Path):
    (library,) = (unpacked / "branchline").glob("_native*")
    assert ctypes.CDLL(str(library)).bl_abi_version() >= 1


def test_wheel_imports_from_an_empty_folder(unpacked: Path, tmp_path: Path):
    modules = [name for name in modules_on_disk() if not name.endswith(".__main__")]
    code = (
        "import importlib, pathlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    module = importlib.import_module(name)\n"
        "    path = pathlib.Path(module.__file__)\n"
        "    assert path.is_relative_to(sys.argv[1]), f'{name} comes from {path}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(unpacked), *modules],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
    )
    assert done.returncode == 0, done.stderr


# --- imports point down


def top_of(module: str) -> str:
    """`branchline.linear.kernels.x` -> `linear`; the root itself -> ``."""
    return ([*module.split("."), ""])[1]


def imported_names(node: ast.AST, module: str, path: Path) -> Iterator[str]:
    """The full names that one statement or call imports; a bare folder name keeps its shape."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def absolute(name: str, level: int) -> str:
        if level == 0:
            return name
        parts = package.split(".")
        if level > len(parts):
            return f"<{'.' * level}{name}: above the package>"
        return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])

    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom):
        base = absolute(node.module or "", node.level)
        # `from .. import linear` imports the folder, not a name out of the root.
        for alias in node.names:
            yield f"{base}.{alias.name}"
    elif isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        first = node.args[0] if node.args else None
        if (
            name in {"import_module", "__import__"}
            and isinstance(first, ast.Constant)
            and isinstance(first.value, str)
        ):
            bare = first.value.lstrip(".")
            yield absolute(bare, len(first.value) - len(bare))


def import_faults(source: str, module: str, path: Path) -> list[str]:
    """What one module imports that it may not, wherever in the file the import stands."""
    own = top_of(module)
    main = module == "branchline.__main__"
    free = main or module == "branchline" or own == "cli"
    faults = []
    for node in ast.walk(ast.parse(source, str(path))):
        for name in imported_names(node, module, path):
            where = f"{module}, line {getattr(node, 'lineno', 0)}: {name}"
            first = name.split(".")[0]
            if first in {*LAYERS, "cli"}:
                faults.append(f"{where}: a folder by its bare name")
                continue
            if name.startswith("<"):
                faults.append(where)
                continue
            if first != "branchline":
                continue
            if isinstance(node, ast.Import) or getattr(node, "level", 1) == 0:
                faults.append(f"{where}: inside the package imports are relative")
            target = top_of(name)
            if target == "cli" and own != "cli" and not main:
                faults.append(f"{where}: nobody imports cli")
            elif free:
                continue
            elif target not in LAYERS:
                faults.append(f"{where}: a layer may not import the root")
            elif LAYERS.index(target) > LAYERS.index(own):
                faults.append(f"{where}: {own} may not import {target}")
    return faults


def test_every_package_has_a_layer():
    tops = {top_of(name) for name in PACKAGES} - {"", "cli"}
    assert tops <= set(LAYERS)


def test_imports_point_down():
    faults = []
    for module, path in modules_on_disk().items():
        faults += import_faults(path.read_text(encoding="utf-8"), module, path)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("branchline.linear.layer", "from ..fusion import site"),
        ("branchline.linear.kernels.fp8", "from ...fusion.sites import find"),
        ("branchline.linear.layer", "def f():\n    from .. import adapters"),
        ("branchline.fusion", "from ..adapters import Manager"),
        (
            "branchline.core.oracle",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..linear import x",
        ),
        ("branchline.core.oracle", "import branchline.core.errors"),
        ("branchline.core.oracle", "from branchline.core import errors"),
        ("branchline.core.oracle", "from .. import __version__"),
        ("branchline.core.oracle", "from core import errors"),
        ("branchline.core.oracle", "import importlib\nimportlib.import_module('..linear', 'x')"),
        ("branchline.core.oracle", "from ...main import x"),
        ("branchline.policies.plan", "from ..cli import main"),
        ("branchline", "from .cli import main"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str):
    package = module in {"branchline", "branchline.fusion"}
    assert import_faults(source, module, Path("__init__.py" if package else "module.py"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("branchline.fusion.sites", "from ..linear import QuantKey\nfrom .. import core"),
        ("branchline.fusion.producers.gated", "from ..registry import register"),
        ("branchline.policies", "from ..core.errors import E\nfrom .plan import Plan"),
        ("branchline.cli.serve", "from .. import __version__\nfrom ..policies import plan"),
        ("branchline", "from .policies import plan"),
        ("branchline.__main__", "from .cli import main"),
        ("branchline.core.oracle", "import torch\nfrom torch.linear import x"),
    ],
)
def test_a_right_import_is_allowed(module: str, source: str):
    package = module in {"branchline", "branchline.policies"}
    assert not import_faults(source, module, Path("__init__.py" if package else "module.py"))
