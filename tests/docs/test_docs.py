"""The documentation is true: promises name tests that exist, examples run, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_promise_names_a_test_that_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "promises.md").read_text())
    assert len(named) > 15
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_examples_of_extending_run_from_top_to_bottom(tmp_path):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", (DOCS / "extending.md").read_text(), re.M | re.S))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readmes_example_runs_as_it_stands(tmp_path):
    first, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    done = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_link_of_the_readme_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (make docs installs it)")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = [page.read_text() for page in site.rglob("*.html")]
    loaded = [
        host for page in pages for host in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page)
    ]
    assert loaded == []
    assert_works_from_disk(site)


def assert_works_from_disk(site: Path) -> None:
    """Every link names a file, and the search has its index as a script: a page from disk may read nothing else."""
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # only a server shows it, and its links start at the server's root
            continue
        links = re.findall(r'<(?:a|link|script|img)\b[^>]*?(?:href|src)="?([^"#>\s]+)', page.read_text())
        local = {link for link in links if not re.match(r"(?:https?|mailto|data):|//", link)}
        missing = [link for link in local if not (page.parent / unquote(link)).is_file()]
        assert missing == [], f"{page.relative_to(site)}: {missing}"
    assert (site / "search" / "search_index.js").is_file()
    assert (site / "assets" / "iframe-worker.js").is_file()
