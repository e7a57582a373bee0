"""`python -m scripts.bench NAME [arguments]` makes a figure of the docs; without a name it lists them, from their first lines."""

from __future__ import annotations

import ast
import difflib
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENTRY = 'if __name__ == "__main__":'  # modules without it are parts of others


def figures() -> dict[str, str]:
    """Name to the first line of its docstring, or of its comment; nothing is imported."""
    found = {}
    for path in sorted(HERE.iterdir()):
        text = path.read_text() if path.suffix in (".py", ".sh") and path.stem != "__main__" else ""
        if path.suffix == ".py" and ENTRY in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        elif path.suffix == ".sh":
            found[path.stem] = text.splitlines()[1].removeprefix("# ")
    return found


def main() -> int:
    known = figures()
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        width = max(map(len, known))
        print(__doc__, *(f"  {name:{width}}  {line}" for name, line in known.items()), sep="\n")
        return 0
    name = sys.argv[1]
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        told = f"; did you mean {', '.join(near)}?" if near else "; without a name all are listed"
        print(f"python -m scripts.bench {name}: no such figure{told}", file=sys.stderr)
        return 2
    if (HERE / f"{name}.sh").exists():
        os.execvp("bash", ["bash", str(HERE / f"{name}.sh"), *sys.argv[2:]])
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(f"scripts.bench.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
