"""The docs as a site: every page is in it, every link leads somewhere, nothing is fetched from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

from miles_async.settings.catalog import catalog

REPO = Path(__file__).parents[2]


def test_the_site_is_whole_and_needs_no_other_host(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "configs/mkdocs.yml", "-d", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr

    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html")}
    assert {f"{page.stem}.html" for page in (REPO / "docs").glob("*.md")} <= set(pages)
    fetched = re.compile(r'(?:src="|<link[^>]+href="|url\()(?:https?:)?//')
    assert [name for name, text in pages.items() if fetched.search(text)] == []
    assert [spec.flag for spec in catalog().values() if spec.flag not in pages["flags.html"]] == []
    assert "search" in {path.name for path in tmp_path.iterdir()}
