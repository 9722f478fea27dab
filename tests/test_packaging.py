"""The package as a whole: its metadata, and the rules of the house that a program can check."""

import ast
import configparser
import pathlib
import re
import subprocess
import sys

import pytest

import mpipar

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "mpipar"
FILES = sorted(PACKAGE.rglob("*.py"))
TEXTS = FILES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))
LONGEST_FILE = 450
LONGEST_LINE = 150
UNFINISHED = re.compile(
    r"\b(TO" r"DO|FIX" r"ME|X" r"XX|NotImplemented" r"Error)\b"
)  # split, or this file would be found

# The floors of mpipar: what each folder may import from the others.
BELOW = {
    "kernels": set(),
    "data": set(),
    "comm": {"kernels"},
    "nn": {"kernels"},
    "parallel": {"kernels", "comm", "nn"},
    "models": {"kernels", "comm", "nn", "parallel"},
    "engine": {"kernels", "comm", "nn", "parallel", "models", "data"},
}


def configuration():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def imports(path, text=None):
    """Every module that a file imports, wherever in the file, by full name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text() if text is None else text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def upward(path, text=None):
    """The imports of a file that its floor does not allow."""
    folder = path.relative_to(PACKAGE).parts[0]
    if folder not in BELOW:
        return []  # the commands on the top floor
    allowed = BELOW[folder] | {folder}
    ours = {name.split(".")[1] for name in imports(path, text) if name.startswith("mpipar.")}
    ours |= {"mpipar"} if any(name == "mpipar" for name in imports(path, text)) else set()
    folders = {item.stem for item in PACKAGE.iterdir()}
    return sorted(name for name in ours if name not in allowed and name in folders)


def test_metadata():
    parser = configuration()
    assert parser["metadata"]["name"] == "mpipar" and parser["options"]["python_requires"] == ">=3.10"
    assert (
        parser["metadata"]["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()
    )
    assert {"mpich", "openmpi", "test"} <= set(parser["options.extras_require"])
    if hasattr(mpipar, "__version__"):
        assert mpipar.__version__ == parser["metadata"]["version"]


def test_pyproject_has_the_build_system_only():
    tables = re.findall(r"^\[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert tables == ["build-system"]


def test_top_level_of_the_repository():
    shown = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if shown.returncode or not shown.stdout:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in shown.stdout.splitlines()}
    allowed = {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "mpipar", "tests", "examples", "slurm"}
    assert {name for name in names if not name.startswith(".")} <= allowed


def test_import_starts_neither_mpi_nor_numba():
    code = "import sys, mpipar; print(sorted({'mpi4py', 'numba', 'llvmlite'} & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert out == "[]\n"


@pytest.mark.parametrize("library, folder", [("mpi4py", "comm"), ("numba", "kernels")])
def test_one_folder_imports(library, folder):
    users = {path for path in FILES if any(name.split(".")[0] == library for name in imports(path))}
    outside = sorted(
        str(path.relative_to(ROOT)) for path in users if path.relative_to(PACKAGE).parts[0] != folder
    )
    assert not outside, f"only mpipar/{folder}/ imports {library}, but so do {outside}"


def test_imports_go_down_the_floors_only():
    wrong = {str(path.relative_to(ROOT)): upward(path) for path in FILES if upward(path)}
    assert not wrong


def test_the_checks_of_imports_see_what_they_should():
    """The negative control of the three tests above."""
    path = PACKAGE / "nn" / "layer.py"
    assert (
        upward(
            path,
            "from mpipar.kernels import gemm\nfrom . import parameter\nfrom .parameter import split_range",
        )
        == []
    )
    assert upward(path, "from mpipar.comm.mesh import Mesh") == ["comm"]
    assert upward(path, "def f():\n    from ..engine import trainer") == ["engine"]
    assert upward(path, "from .. import comm") == ["comm"]
    assert "mpi4py.MPI" in set(imports(path, "from mpi4py import MPI"))


def test_every_folder_says_what_lives_there():
    folders = {path.parent for path in FILES}
    silent = [
        str(folder.relative_to(ROOT))
        for folder in folders
        if not (folder / "__init__.py").exists()
        or not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ]
    assert not silent


def faults(path, text=None):
    """What in a file is against the rules of the house, as lines of text."""
    text = path.read_text() if text is None else text
    lines, tree, name = text.splitlines(), ast.parse(text), path.relative_to(ROOT)
    if len(lines) > LONGEST_FILE:
        yield f"{name}: {len(lines)} lines; look for the second subject"
    if lines and not ast.get_docstring(tree):
        yield f"{name}: no docstring that says what the file is about"
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            yield f"{name}:{number}: {len(line)} characters"
        if UNFINISHED.search(line):
            yield f"{name}:{number}: unfinished"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{name}:{node.lineno}: a global statement"


def test_style():
    found = [fault for path in TEXTS for fault in faults(path)]
    assert not found, "\n".join(found)


def test_the_check_of_style_sees_what_it_should():
    text = "def f():\n    global x  # TO" "DO\n" + "#" * (LONGEST_LINE + 1) + "\n" * LONGEST_FILE
    assert [fault.split(": ")[1][:14] for fault in faults(PACKAGE / "f.py", text)] == [
        "452 lines; loo",
        "no docstring t",
        "unfinished",
        "151 characters",
        "a global state",
    ]
