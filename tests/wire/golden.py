"""`python -m tests.wire.golden` adds bytes for examples of the newest schema that have none yet; what is there stays."""

from __future__ import annotations

from bus.messages.base import SCHEMA
from bus.messages.codec import encode
from tests.wire.examples import read_golden, tag_of
from tests.wire.examples_2 import EXAMPLES, GOLDEN


def main() -> None:
    """Add what is missing."""
    known = read_golden(GOLDEN) if GOLDEN.exists() else {}
    heading = [f"# schema {SCHEMA}: message tag, body in hexadecimal"]
    lines = GOLDEN.read_text().splitlines() if GOLDEN.exists() else heading
    lines += [f"{tag_of(m)} {encode(m).hex()}" for m in EXAMPLES if tag_of(m) not in known]
    GOLDEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
