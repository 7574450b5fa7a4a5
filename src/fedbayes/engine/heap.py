"""The memory that a CPU's steps leave behind is kept for the next ones.

A step's activations are freed when it ends. The C library then gives large ones back to the system, and the next step
has to fetch them page by page again: up to a quarter of a step with convolutions. This is a setting of the process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

OWN_WORDS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")  # a user's own
SWITCH = "FEDBAYES_KEEP_MEMORY"  # 0: leave the C library as it is

# Of glibc's malloc.h: what a setting is called there, and its value here.
SETTINGS = {
    -3: 32 * 2**20,  # M_MMAP_THRESHOLD, at its most: below it memory comes from the heap and stays in it
    -1: 256 * 2**20,  # M_TRIM_THRESHOLD: free bytes at the heap's end that are kept
    1: 0,  # M_MXFAST: small pieces need not be merged whenever a large one is freed
}


@functools.cache
def keep_memory() -> bool:
    """Keep freed memory in the process, at most a quarter of a GiB at its end; whether that was done.

    With glibc only, and not where the environment says otherwise.
    """
    told = os.environ.get(SWITCH, "1") == "0" or any(name in os.environ for name in OWN_WORDS)
    if told or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in SETTINGS.items())
