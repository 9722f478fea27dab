"""Where compiled code is kept: each process in its own interpreter, on a small package that uses the real
cache module."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mpipar.kernels.cache as cache

KERNELS = Path(cache.__file__).parent
MAIN = """
from .cache import jit
from .helper import amount

@jit
def kernel(x):
    return x + amount(x)

@jit
def second(x):
    return kernel(x) * 2
"""
HELPER = """
from .cache import jit

@jit
def amount(x):
    return x * {factor}
"""
RUN = """
import sys
from toy.kernels.main import kernel, second
from toy.kernels.cache import compiled_count, cache_directory
kernel({one}), second({one})
print(kernel({one}), compiled_count())
"""


class Package:
    """A package `toy` with two kernel files beside copies of ours, and the environment to run it in."""

    def __init__(self, root):
        self.root = root
        self.store = root / "store"
        self.folder = root / "src" / "toy" / "kernels"
        self.folder.mkdir(parents=True)
        (self.folder.parent / "__init__.py").write_text("")
        for name in ("__init__.py", "cache.py", "loading.py"):
            shutil.copy(KERNELS / name, self.folder / name)
        (self.folder / "main.py").write_text(MAIN)
        self.write_helper(1)

    def write_helper(self, factor):
        (self.folder / "helper.py").write_text(HELPER.format(factor=factor))

    def environment(self, **changes):
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("MPIPAR_", "NUMBA_", "XDG_", "PMI", "MPI", "OMPI", "HYD"))}
        kept.update(PYTHONPATH=str(self.root / "src"), MPIPAR_CACHE_DIR=str(self.store))
        kept.update(PYTHONDONTWRITEBYTECODE="1")
        kept.update(changes)
        return {name: value for name, value in kept.items() if value is not None}

    def start(self, one="1.0", **changes):
        return subprocess.Popen([sys.executable, "-c", RUN.format(one=one)], env=self.environment(**changes),
                                cwd=self.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @staticmethod
    def finish(process):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out.split(), err

    def execute(self, code):
        done = subprocess.run([sys.executable, "-c", code], env=self.environment(), cwd=self.root, text=True,
                              capture_output=True, timeout=120)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout.split()

    def run(self, one="1.0", **changes):
        (value, count), err = self.finish(self.start(one, **changes))
        return float(value), int(count), err


@pytest.fixture
def package(tmp_path):
    return Package(tmp_path)


def test_a_kernel_outside_the_folder_is_known_by_its_file(package):
    outside = package.folder.parent / "other.py"
    for factor in (3, 4):
        outside.write_text(MAIN.replace("from .", "from .kernels.").replace("* 2", f"* {factor}"))
        code = "from toy.other import second; print(second(1.0))"
        done = subprocess.run([sys.executable, "-c", code], env=package.environment(), capture_output=True,
                              text=True, timeout=120)
        assert float(done.stdout) == 2.0 * factor, done.stderr


def test_processes_that_follow_compile_nothing(package):
    assert package.run() == (2.0, 3, "")
    others = [package.start() for _ in range(2)]
    assert [Package.finish(process)[0] for process in others] == [["2.0", "0"]] * 2


def test_editing_a_helper_in_another_file_changes_the_next_run(package):
    assert package.run()[:2] == (2.0, 3)
    stamp = (package.folder / "helper.py").stat()
    package.write_helper(5)
    # The same size and the same time: only the bytes differ.
    os.utime(package.folder / "helper.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert package.run()[:2] == (6.0, 3)
    package.write_helper(1)
    assert package.run()[:2] == (2.0, 0)  # the earlier state is still there


def test_a_process_that_only_loads_leaves_the_compiler_out(package):
    """Numba's own functions for compiling NumPy's are imported with the first compilation, not before."""
    code = RUN.format(one="1.0") + "print('numba.np.linalg' in sys.modules)"
    assert [package.execute(code) for _ in range(2)] == [["2.0", "3", "True"], ["2.0", "0", "False"]]


def test_a_caller_is_compiled_after_its_helper_was_loaded(package):
    """The helper's bitcode, left unread until then, becomes part of the caller."""
    first, both = RUN.format(one="1.0").replace(", second(1.0)", ""), RUN.format(one="1.0")
    assert package.execute(first) == ["2.0", "2"]
    both += "print(second(3.0), kernel(3.0))"
    assert [package.execute(both) for _ in range(2)] == [["2.0", "1", "12.0", "6.0"], ["2.0", "0", "12.0", "6.0"]]
    for path in package.store.rglob("main.kernel-*.bin"):
        path.unlink()  # the caller does not lean on it
    only = RUN.format(one="1.0").replace("kernel(1.0), second", "second").replace("kernel(1.0), comp", "second(1.0), comp")
    assert package.execute(only) == ["4.0", "0"]


def test_arrays_in_processes_that_only_load(package):
    """Numba's run time, which counts references to arrays, comes from the store too; damaged, it is made again."""
    (package.folder / "main.py").write_text(MAIN.replace("return x + amount(x)", "return np.ones(3) * x + amount(x)")
                                            .replace("from .cache", "import numpy as np\nfrom .cache"))
    code = ("from toy.kernels.main import kernel; from toy.kernels.cache import compiled_count\n"
            "kept = [kernel(float(i)) for i in range(1000)]; kept = kept[500:]\n"
            "print(sum(sum(x) for x in kept), compiled_count())")
    total = str(float(3 * 2 * sum(range(500, 1000))))
    with_imports = code + "; import sys; print('numba.np.arrayobj' in sys.modules)"     # where `np.ones` is written
    assert [package.execute(with_imports) for _ in range(2)] == [[total, "2", "True"], [total, "0", "False"]]
    (runtime,) = package.store.rglob("runtime-*.object")
    good = runtime.read_bytes()
    for bad in (b"", good[:-1]):
        runtime.write_bytes(bad)
        assert package.execute(code) == [total, "0"] and runtime.stat().st_size == len(good)


def test_a_kernel_that_cannot_be_compiled_fails_each_time_at_once(package):
    """The lock that the first attempt took must not keep the second one waiting."""
    (package.folder / "main.py").write_text(MAIN.replace("return x + amount(x)", "return x.nothing"))
    code = ("import time; from toy.kernels.main import kernel\n"
            "begin = time.monotonic()\n"
            "for _ in range(2):\n"
            "    try: kernel(1.0)\n"
            "    except Exception as error: print('nothing' in str(error))\n"
            "print(time.monotonic() - begin < 60)")
    assert package.execute(code) == ["True"] * 3


def test_several_at_once_with_an_empty_cache(package):
    """Two types at once: with Numba's own file names one process could load the code of the other."""
    started = [package.start(one) for one in ("1.0", "1") * 3]
    for (value, _), err in [Package.finish(process) for process in started]:
        assert float(value) == 2.0 and err == ""
    assert package.run()[:2] == (2.0, 0) and package.run(one="1")[:2] == (2.0, 0)
    assert not list(package.store.rglob("*.part"))


def test_numba_settings_do_not_interfere(package):
    assert package.run(NUMBA_CACHE_DIR=str(package.root / "other"))[:2] == (2.0, 3)
    assert package.run(NUMBA_OPT="1")[:2] == (2.0, 3)  # other code, another state
    assert not (package.root / "other").exists()


def test_damaged_files_are_compiled_again(package):
    package.run()
    for i, path in enumerate(sorted(package.store.rglob("*.bin"))):
        raw = path.read_bytes()
        path.write_bytes([b"", raw[:-1], raw[:50] + b"x" + raw[51:]][i % 3])
    assert package.run() == (2.0, 3, "")


def test_a_full_or_closed_directory_is_one_warning(package):
    package.store.write_text("a file, not a directory")
    value, count, err = package.run()
    assert (value, count) == (2.0, 3) and err.count("Warning") == 1
    assert str(package.store) in err and "compiled anew" in err


def test_without_a_home_the_temporary_directory_serves(package):
    temporary = package.root / "tmp"
    temporary.mkdir()
    for home in ("/dev/null/none", str(package.root / "home")):
        value, count, err = package.run(HOME=home, MPIPAR_CACHE_DIR=None, TMPDIR=str(temporary))
        assert (value, count, err) == (2.0, 3, "")
    assert list(temporary.glob("mpipar-*/*/*.bin"))
    assert list((package.root / "home").rglob(".cache/mpipar/*/*.bin"))


def test_read_only_install_and_no_place_to_write(package):
    for path in [*package.folder.iterdir(), package.folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        nowhere = "/dev/null/none"  # cannot be made, not even by root
        value, count, err = package.run(HOME=nowhere, MPIPAR_CACHE_DIR=nowhere, TMPDIR=nowhere)
        assert (value, count) == (2.0, 3) and err.count("Warning") == 1
        assert package.run() == (2.0, 3, "")
    finally:
        package.folder.chmod(0o755)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no users")
def test_a_directory_that_others_can_write_is_not_trusted(package):
    package.store.mkdir()
    package.store.chmod(0o777)
    value, _, err = package.run()
    assert value == 2.0 and "writable by others" in err and err.count("Warning") == 1


def test_old_states_are_pruned(package):
    package.run()
    (state,) = package.store.iterdir()
    for i in range(20):
        old = package.store / f"{i:024x}"
        old.mkdir()
        (old / "x.bin").write_bytes(b"x")
        os.utime(old, (time.time() - 1000 * (20 - i),) * 2)
    (package.store / "notes.txt").write_text("not ours")
    package.write_helper(3)
    assert package.run()[0] == 4.0
    left = sorted(path.name for path in package.store.iterdir() if path.is_dir())
    assert len(left) == cache.KEEP_STATES + 1
    assert state.name in left and f"{19:024x}" in left and f"{0:024x}" not in left
    assert (package.store / "notes.txt").exists()


def test_a_store_that_vanishes_is_made_again(package):
    removed = "import shutil; kernel(1.0); shutil.rmtree(cache_directory()); second(1.0)"
    code = RUN.format(one="1.0").replace("kernel(1.0), second(1.0)", removed)
    done = subprocess.run([sys.executable, "-c", code], env=package.environment(), capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["2.0", "3"] and done.stderr == ""
    assert list(package.store.rglob("*second*.bin"))


def test_importing_mpipar_starts_no_compiler():
    code = "import mpipar, sys; print('numba' in sys.modules, 'mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_closure_is_refused():
    outside = 1

    def kernel(x):
        return x + outside

    with pytest.raises(AssertionError, match="closure"):
        cache.jit(kernel)
