"""Where compiled kernels are kept, and the decorator that compiles them.

Numba's own cache knows a function by the source file it stands in: a helper edited in another file goes
unnoticed, and two processes that fill an empty cache with different types at once can swap their code,
because both number their files from one. So kernels use a store of their own: one directory for each state of
all kernel sources, compiler versions and CPU, and in it one file for each function and signature, written
under another name and then renamed. While a process compiles a function it holds a lock on the file's name, so
that others wait for the code rather than make it too; the system lets go of the lock of a process that dies.
"""

import functools
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import threading
import time
import uuid
import warnings
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.serialize import dumps

from .loading import rebuild, start_runtime

try:
    import fcntl
except ImportError:  # no POSIX system: processes that start at once may compile the same kernel twice
    fcntl = None

UNRELATED = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS")  # environment of Numba that changes no code
KEEP_STATES = 8  # directories of older states that stay beside the present one
LONGEST_WAIT = 120.0  # seconds for which a process waits for another that compiles the same kernel


def jit(function=None, *, fastmath=False, inline=False):
    """Compiles a kernel in Numba's no-Python mode on its first call; the code is kept in this module's store.

    The GIL is released, division by zero gives inf as in NumPy, indices are not checked. fastmath: False,
    True or a set of LLVM flags. inline: for a helper of one or two kernels; it becomes part of its callers
    and is never compiled by itself, which saves compile time. Use as `@jit` or `@jit(fastmath=...)`, on
    functions of a module (not on closures).
    """
    if function is None:
        return functools.partial(jit, fastmath=fastmath, inline=inline)
    compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False, fastmath=fastmath,
                          inline="always" if inline else "never")(function)
    if hasattr(compiled, "_cache"):  # not so under NUMBA_DISABLE_JIT
        flags = sorted(fastmath) if isinstance(fastmath, (set, frozenset)) else fastmath  # the order of a set varies
        compiled._cache = _FunctionStore(function, repr(flags))
    return compiled


def once(function):
    """A function without arguments that does its work the first time it is called, whichever thread calls it."""
    lock, done = threading.Lock(), []

    @functools.wraps(function)
    def call():
        if not done:
            with lock:
                if not done:
                    function()
                    done.append(True)

    return call


def compile_only(kernel, *signature):
    """Compiles a kernel for these types; a call then makes no other form, as for each layout of its arrays."""
    kernel.disable_compile(False)
    kernel.compile(signature)
    kernel.disable_compile()


def compiled_count() -> int:
    """How many compilations (function and signature) this process has done, rather than loaded."""
    return _state.compiled


def cache_directory() -> Path | None:
    """The directory of the present state, made if need be; None (with one warning) if none can be written."""
    return _state.directory()


def is_cold() -> bool:
    """Whether nothing has been compiled yet for the present state of the sources and this machine."""
    directory = cache_directory()
    return directory is None or next(directory.iterdir(), None) is None


def source_key() -> str:
    """Hash over every kernel source, the versions of the compilers, Python, the CPU and Numba's switches."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    features = sorted(name for name, on in llvm.get_host_cpu_features().items() if on)
    switches = sorted(item for item in os.environ.items()
                      if item[0].startswith("NUMBA_") and item[0] not in UNRELATED)
    versions = numba.__version__, llvmlite.__version__, np.__version__, sys.version
    machine = platform.machine(), llvm.get_host_cpu_name(), features
    digest.update(repr((versions, machine, switches)).encode())
    return digest.hexdigest()[:24]


class _State:
    """The store's directory, found once, and the count of compilations."""

    def __init__(self):
        self.compiled = 0
        self.lock = threading.Lock()
        self.warned = False
        self._directory = None
        self._looked = False

    def directory(self):
        if not self._looked:
            with self.lock:
                if not self._looked:
                    self._directory = _open_store(self.warn)
                    self._looked = True
        return self._directory

    def warn(self, text):
        if not self.warned:
            self.warned = True
            warnings.warn(f"mpipar: {text}; kernels are compiled anew in every process", RuntimeWarning,
                          stacklevel=2)

    def give_up(self, error):
        """Stops using the store after a failed write (a full disk, a directory that was taken away)."""
        self.warn(f"compiled kernels cannot be kept ({error})")
        self._directory = None


def _roots():
    if named := os.environ.get("MPIPAR_CACHE_DIR"):
        yield Path(named)
        return  # a directory that the user named is not silently replaced by another
    if base := os.environ.get("XDG_CACHE_HOME"):
        yield Path(base) / "mpipar"
    try:
        yield Path.home() / ".cache" / "mpipar"
    except RuntimeError:  # no home directory at all
        pass
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    yield Path(tempfile.gettempdir()) / f"mpipar-{user}"


def _open_store(warn):
    try:
        key = source_key()
    except OSError as error:
        warn(f"the kernel sources cannot be read ({error})")
        return None
    tried = []
    for root in _roots():
        directory = root / key
        try:
            new = not directory.is_dir()
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_ours(root):
                raise PermissionError(f"{root} belongs to another user or is writable by others")
            with tempfile.TemporaryFile(dir=directory):
                pass
            os.utime(directory)  # the order of last use, for pruning
        except OSError as error:
            tried.append(f"{root}: {error.strerror or error}")
            continue
        if new:
            _prune(root, directory)
        return directory
    warn("no directory for compiled kernels can be written (" + "; ".join(tried) + ")")
    return None


def _is_ours(root):
    # Entries are pickles: a directory that other users can write to could make us run their code.
    if not hasattr(os, "getuid"):
        return True
    status = root.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _prune(root, present):
    states = []
    for path in root.iterdir():
        try:
            if path.is_dir() and len(path.name) == len(present.name) and path != present:
                states.append((path.stat().st_mtime, path))
        except OSError:  # another process prunes as well
            continue
    for _, path in sorted(states, reverse=True)[KEEP_STATES:]:
        shutil.rmtree(path, ignore_errors=True)


class _FunctionStore(NullCache):
    """What a Numba dispatcher asks before it compiles, and tells afterwards."""

    def __init__(self, function, options):
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        code = function.__code__
        self.identity = (function.__module__, function.__qualname__, code.co_firstlineno, options)
        source = Path(code.co_filename)
        if source.parent != Path(__file__).parent and source.is_file():  # not among the sources of the key
            self.identity += (hashlib.sha256(source.read_bytes()).hexdigest(),)
        self.held = {}  # lock files of what this process is compiling, by path of the code
        assert function.__closure__ is None, f"{self.name}: a kernel may not be a closure"

    @property
    def cache_path(self):
        directory = _state.directory()
        return None if directory is None else str(directory)

    def _path(self, directory, signature, codegen):
        return directory / f"{self.name}-{_hash((self.identity, signature, codegen.magic_tuple()))}.bin"

    def load_overload(self, sig, target_context):
        """The compiled form for a signature, or None: then it is to be compiled, and others wait for it.

        A file that is damaged counts as absent."""
        directory = _state.directory()
        if directory is None:
            return None
        codegen = target_context.codegen()
        runtime = directory / f"runtime-{_hash(codegen.magic_tuple())}.object"
        start_runtime(target_context, lambda: _read(runtime), lambda raw: _write(runtime, raw))
        path = self._path(directory, sig, codegen)
        raw = _read(path)
        if raw is None and self._lock(path):
            raw = _read(path)  # another process may have made it meanwhile
            if raw is not None:
                self._unlock(path)
        return None if raw is None else rebuild(target_context, raw)

    def _lock(self, path):
        # True if this process now holds the lock (or waited in vain: two compilations do no harm).
        if fcntl is None:
            return False
        if path in self.held:  # an earlier compilation in this process failed
            return True
        try:
            descriptor = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            return False
        until = time.monotonic() + LONGEST_WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.held[path] = descriptor
                return True
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(descriptor)
                    return True
                time.sleep(0.01)
            except OSError:  # a file system without locks
                os.close(descriptor)
                return False

    def _unlock(self, path):
        descriptor = self.held.pop(path, None)
        if descriptor is not None:
            path.with_suffix(".lock").unlink(missing_ok=True)
            os.close(descriptor)

    def save_overload(self, sig, data):
        """Called by Numba after each compilation."""
        with _state.lock:
            _state.compiled += 1
        directory = _state.directory()
        if directory is None:
            return
        fixed = not data.lifted and not data.library.has_dynamic_globals
        assert fixed, f"{self.name} holds addresses of this process"
        path = self._path(directory, sig, data.codegen)
        try:
            _write(path, dumps(data._reduce()))
        finally:
            self._unlock(path)


def _hash(identity) -> str:
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]


def _write(path, raw):
    """Writes a pickle under another name, then renames it; if that fails, the store is used no more."""
    part = path.with_suffix(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # another process may have pruned it
        part.write_bytes(hashlib.sha256(raw).digest() + raw)
        os.replace(part, path)
    except OSError as error:
        _state.give_up(error)
        try:
            part.unlink()
        except OSError:
            pass


def _read(path):
    """The pickle that `_write` put there; None if it is absent or damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    return raw[32:] if hashlib.sha256(raw[32:]).digest() == raw[:32] else None


_state = _State()
