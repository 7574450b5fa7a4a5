"""One self-contained page from run folders; reads files, needs no torch."""

from pathlib import Path


def write(folders, path):
    return path
