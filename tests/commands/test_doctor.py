"""`python -m mpipar.doctor`: what it shows, what it calls trouble, and that it compiles ahead."""

import pytest

from mpipar.commands import doctor
from mpipar.kernels import cache


def test_shows_the_machine(capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for word in ("processor", "cores", "memory", "packages", "MPI", "launcher", "kernels", "numba"):
        assert word in shown


def test_trouble_is_named_and_changes_the_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(cache, "cache_directory", lambda: None)
    monkeypatch.setattr(doctor, "SMALL_SHARED_MEMORY", 1 << 62)
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert shown.count("trouble ") == 2 and "MPIPAR_CACHE_DIR" in shown and "/dev/shm" in shown


def test_dtype_alone_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        doctor.main(["--dtype", "float32"])
    assert end.value.code == 2 and "--warm" in capsys.readouterr().err


def test_compiles_ahead_once(tmp_path, monkeypatch):
    """Two processes divide the modules; what they share is compiled by one of them, and nothing by the second call."""
    monkeypatch.setenv("MPIPAR_CACHE_DIR", str(tmp_path))
    few = ("gelu", "loss", "elementwise")
    monkeypatch.setattr(doctor, "compile_tasks", lambda dtype: few)
    monkeypatch.setattr(doctor, "_compile", _compile_few)
    _, compiled = doctor.compile_ahead("float32")
    assert compiled == len(list(tmp_path.rglob("*.bin"))) > len(few)
    assert doctor.compile_ahead("float32")[1] == 0


def _compile_few(number, dtype):
    import importlib

    before = cache.compiled_count()
    importlib.import_module(f"mpipar.kernels.{('gelu', 'loss', 'elementwise')[number]}").warm(dtype)
    return cache.compiled_count() - before
