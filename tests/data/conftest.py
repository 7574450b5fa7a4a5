"""Every test has a data folder and a cache of its own; only tests marked `data` see the real files."""

import os
from pathlib import Path

import pytest

REAL = os.environ.get("FEDBAYES_DATA")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.setenv("FEDBAYES_DATA", str(folder))
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def real(home: Path, real_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The benchmark files, with one cache for the whole session."""
    if not REAL:
        pytest.skip("FEDBAYES_DATA is not set: no benchmark files to read")
    monkeypatch.setenv("FEDBAYES_DATA", REAL)
    monkeypatch.setenv("FEDBAYES_CACHE", str(real_cache))
    return Path(REAL)
