"""Part of `make docs`: what pages link to outside of `docs/` becomes part of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\(([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add linked documents and pictures of the repository, and what these link to."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / link).resolve()
            if "://" in link or path in seen or not path.is_file():
                continue
            seen.add(path)
            if not path.is_relative_to(ROOT / "docs"):
                files.append(
                    File.generated(
                        config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)
                    )
                )
            if path.suffix == ".md":
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of `docs/` to the rest of the repository, and back, as they are on the site."""
    if Path(page.file.abs_src_path).is_relative_to(ROOT / "docs"):
        return markdown.replace("](../", "](")
    return markdown.replace("](docs/", "](").replace("](../docs/", "](../")
