"""The library's version, said once."""

__version__ = "0.2.0"
