"""What is Flower's stands at one place."""

import ast
from pathlib import Path

import fedbayes

ROOT = Path(fedbayes.__file__).parent


def imports(file: Path) -> set[str]:
    """The packages that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_one_file_imports_flower() -> None:
    assert [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if "flwr" in imports(p)] == ["flower/library.py"]
