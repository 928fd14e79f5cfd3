"""MkDocs hooks: pages that lie outside docs/, the settings from their schema, and links between all of them.

A link from a page to a file that is no page of the site becomes the file's path as text. A link to a file that does not
exist is a warning, with which a strict build fails.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from tf_adapters.config import TimelyFreezeConfig, allowed

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
log = logging.getLogger("mkdocs.hooks.links")
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "deepspeed_configs/paper/README.md": "deepspeed_configs/paper.md",
    **{f"{path.relative_to(ROOT)}": f"examples/{path.parent.name}.md" for path in ROOT.glob("examples/*/README.md")},
}
"""Pages outside docs/, and what they are in the site."""
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/, the benchmarks' pictures, and the table of settings."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted(RESULTS.rglob("*.png")):
        place = picture.relative_to(RESULTS).as_posix()
        files.append(File.generated(config, f"images/{place}", abs_src_path=str(picture)))
    files.append(File.generated(config, "settings_reference.md", content=settings_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page, which are right in the repository, become right in the site."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")
    for folder in ("docs/images", "../benchmarks/results"):  # README's picture, and those of the benchmarks
        markdown = re.sub(rf"(!\[[^\]]*\]\()(?:{folder})/", r"\1images/", markdown)
    return LINK.sub(lambda match: site_link(match, source, here), markdown)


def site_link(match: re.Match[str], source: str, here: str) -> str:
    text, target = match[1], match[2]
    path, _, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return match[0]
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if (ROOT / found).is_dir() and (ROOT / found / "README.md").is_file():
        found += "/README.md"
    if found in PAGES or found.startswith("docs/"):
        page = PAGES.get(found, found.removeprefix("docs/"))
        relative = posixpath.relpath(page, posixpath.dirname(here) or ".")
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"
    if not os.path.exists(ROOT / found):
        log.warning("%s links to %s, which does not exist", source, found)
    return text if found in text else f"{text} (`{found}`)"


def settings_page() -> str:
    """Every setting with its default, what is allowed and its description, from the schema."""
    rows = [
        f"| `{name}` | `{field.default!r}` | {_cell(allowed(name))} | {_cell(field.description or '')} |"
        for name, field in TimelyFreezeConfig.model_fields.items()
        if name != "enabled"
    ]
    head = "# Settings: reference\n\nFrom the schema; [what each is for](settings.md).\n\n"
    return head + "| setting | default | allowed | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
