"""Pages of the site that are made from the code when it is built (a hook of mkdocs): every setting, and Miles' flags.

pip install 'miles-async[docs]' && mkdocs build --strict -f configs/mkdocs.yml       (writes site/; mkdocs serve shows it)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO)]


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls this before it reads the pages."""
    from mkdocs.structure.files import File

    for name, page in (("flags.md", settings_page()), ("flags-of-miles.md", miles_page())):
        files.append(File.generated(config, name, content=page))
    return files


def settings_page() -> str:
    """All settings by table, as `miles-async train --help` has them."""
    from miles_async.settings.catalog import NO_DEFAULT, groups

    page = [
        "# All settings",
        "Each is a field of the run's TOML file and a flag; [configuration.md](configuration.md) says how they go together. "
        "*Live* settings may be changed by `miles-async tune` while the run goes on; where the change takes effect follows.",
    ]
    for table, specs in groups().items():
        page += [f"## {table}", "| flag | default | what it is |\n|---|---|---|"]
        for spec in specs:
            default = spec.derived or ("required" if spec.default is NO_DEFAULT else _shown(spec.default))
            text = [spec.text, f"Unit: {spec.unit}." if spec.unit else "", f"Value: {spec.expected}."]
            text += [f"Live: {spec.live}." if spec.live else ""]
            text += [f"Also {', '.join('--' + a.replace('_', '-') for a in spec.aliases)}." if spec.aliases else ""]
            row = " | ".join(_cell(x) for x in (f"`{spec.flag}`", default, " ".join(filter(None, text))))
            page[-1] += f"\n| {row} |"
    return "\n\n".join(page) + "\n"


def miles_page() -> str:
    """What each flag of Miles is here, as `miles-async train --help miles` has it."""
    from miles_async.settings.miles import table

    rows = "\n".join(f"| `{flag}` | {_cell(fate)} |" for flag, fate in table())
    return f"# Flags of Miles\n\nSee [coming from Miles](from-miles.md).\n\n| flag | here |\n|---|---|\n{rows}\n"


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, list | tuple | dict):
        return "`" + " ".join(map(str, value)) + "`" if value else "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
