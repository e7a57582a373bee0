"""A folder of wheels, this project's among them, from which nodes without a registry install it.

    .venv/bin/python scripts/pack_wheels.py kit --extras sglang,math        # where there is a registry
    pip install --no-index --find-links kit 'miles-async[sglang,math]'      # on the nodes

The wheels are for the Python and the platform that this runs with, so pack where both are those of the nodes. What comes after
`--` goes to `pip wheel`, e.g. an index or constraints. SHA256SUMS in the folder is for `sha256sum -c`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def pack(folder: Path, project: Path, extras: str, pip: list[str]) -> list[Path]:
    """Build and collect; the wheels. subprocess.CalledProcessError when pip fails, which has said why."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{project.resolve()}[{extras}]" if extras else str(project.resolve())
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--wheel-dir", str(folder), *pip, wanted], check=True)
    wheels = sorted(folder.glob("*.whl"))
    sums = [f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return wheels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extras", default="", help="of pyproject.toml, with commas: sglang,math")
    parser.add_argument("--project", type=Path, default=REPO, help="another project than this one")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    try:
        wheels = pack(args.folder, args.project, args.extras, sys.argv[at + 1 :])
    except subprocess.CalledProcessError as error:
        print(f"no kit was packed: pip ended with status {error.returncode}; its reason stands above", file=sys.stderr)
        return 1
    print(f"{len(wheels)} wheels, {sum(w.stat().st_size for w in wheels) / 1e6:,.0f} MB, in {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
