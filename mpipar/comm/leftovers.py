"""What killed jobs of this user left in /dev/shm, removed by the next start.

MPI libraries keep the memory that the ranks of a node share in files there. A job that ends removes its own; one that
is killed (signal 9, out of memory) can't, and the files take memory until somebody does.
"""
import functools
import os
import pathlib
import time

FOLDER = pathlib.Path("/dev/shm")
PATTERNS = ("mpich_shm_*", "mpich_shar_tmp*", "sm_segment.*", "vader_segment.*", "ucx_shm_posix_*")
YOUNGEST = 2.0  # seconds: a younger file may belong to a job that is about to open it


@functools.cache
def clean_once():
    """`clean`, the first time that this process calls it; only where files of killed jobs can be told apart."""
    return clean() if pathlib.Path("/proc/self/maps").exists() else []


def clean(folder=FOLDER, patterns=PATTERNS, youngest=YOUNGEST):
    """Remove the files of `patterns` that are this user's, older than `youngest` seconds, and used by no process.

    Returns their names. Never fails: what can't be looked at or removed stays.
    """
    found = {}
    for pattern in patterns:
        for path in folder.glob(pattern):
            try:
                status = path.stat()
            except OSError:
                continue
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > youngest:
                found[(status.st_dev, status.st_ino)] = path
    if not found:
        return []
    used = _used_inodes()
    removed = []
    for (_, inode), path in found.items():
        if inode not in used:
            try:
                path.unlink()
            except OSError:
                continue
            removed.append(path.name)
    return removed


def _used_inodes():
    """Inodes that this user's processes have mapped or opened.

    A process that hides from its own user (one with privileges) is no rank of a job. And should a file be removed that
    somebody had mapped: the memory stays with those who have it, only the name goes.
    """
    used = set()
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if process.stat().st_uid != os.getuid():
                continue
            for line in (process / "maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) > 4 and fields[4] != "0":
                    used.add(int(fields[4]))
            for handle in (process / "fd").iterdir():
                try:
                    used.add(handle.stat().st_ino)
                except OSError:
                    continue
        except OSError:
            continue                            # it has ended meanwhile, or hides
    return used
