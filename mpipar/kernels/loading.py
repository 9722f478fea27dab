"""Compiled kernels from their stored form, with no more of the compiler in memory than running them takes.

Numba prepares each process for compiling whatever may be called in it: it imports its versions of NumPy and Python
(and SciPy, where that is installed), makes its own run time with all of LLVM's passes, and keeps the bitcode of what
it loads, for callers that are compiled later. A rank that finds its kernels in the store compiles nothing, and these
three would be a quarter of its memory. Here the imports wait for the first compilation (Numba then makes them
itself), the run time is stored as the kernels are, and bitcode is read again if a caller is compiled.
"""

import io
import pickle
import sys

import llvmlite.binding as llvm
from numba.core.compiler import CompileResult
from numba.core.environment import Environment, lookup_environment
from numba.core.runtime import nrtdynmod, rtsys
from numba.core.serialize import dumps


def start_runtime(target_context, read, write):
    """Makes the functions of Numba's run time (reference counts of arrays) ready, from the store if they lie there.

    read() -> bytes or None, write(bytes): the place in the store. Numba's lock on its compiler is held by the caller."""
    makes = nrtdynmod.compile_nrt_functions

    def stored_or_made(context):
        raw = read()
        if raw is not None:
            return context.codegen().unserialize_library(pickle.loads(raw))
        module, library = nrtdynmod.create_nrt_module(context)
        library.enable_object_caching()
        library.add_ir_module(module)
        library.finalize()
        write(dumps(library.serialize_using_object_code()))
        return library

    nrtdynmod.compile_nrt_functions = stored_or_made
    try:
        rtsys.initialize(target_context)  # returns at once from the second call on
    finally:
        nrtdynmod.compile_nrt_functions = makes


def rebuild(target_context, raw: bytes) -> CompileResult:
    """A kernel from what `CompileResult._reduce` gave, pickled; its bitcode stays unread."""
    stored, *rest = _Reader(io.BytesIO(raw)).load()
    kernel = CompileResult._rebuild(target_context, stored, *rest)
    _, kind, code = stored
    if kind == "object":
        _leave_unread(kernel.library, bitcode=code[1])
    return kernel


class _Reader(pickle.Unpickler):
    """Reads a kernel without importing the modules that its parts were written in."""

    def find_class(self, module, name):
        return _environment if name == "_rebuild_env" else super().find_class(module, name)


def _environment(module, constants, name):
    # What Numba does, but for the import: machine code looks up constants here, and none of the module's names.
    found = lookup_environment(name)
    if found is None:
        found = Environment(vars(sys.modules[module]) if module in sys.modules else {})
        found.consts[:] = constants
        found.env_name = name
        Environment._memo[name] = found
    return found


def _leave_unread(library, bitcode):
    # The machine code is with the engine by now; LLVM's form of the 44 kernels of a small GPT took 18 MiB.
    def when_a_caller_is_compiled():
        library._shared_module = llvm.parse_bitcode(bitcode)
        del library._get_module_for_linking  # Numba's own is in force again
        return library._shared_module

    library._shared_module = None
    library._get_module_for_linking = when_a_caller_is_compiled
