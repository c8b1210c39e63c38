"""Fits README.md and pyproject.toml to a package index, where links need an address: the first step of a release.

    python docs/build_package_page.py https://github.com/OWNER/NAME v0.1.0

Pictures and links of README.md then point to the files of that tag, and the package's page names where the project
is. Both files of the checkout are changed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")


def package_page(readme: str, repository: str, tag: str) -> str:
    """A README whose links work outside the repository.

    Args:
        readme: Its text.
        repository: The address of the repository at GitHub.
        tag: The tag or branch that the links point to.
    """

    def absolute(match: re.Match[str]) -> str:
        picture, text, path, anchor = match.groups()
        view = "raw" if picture else "blob"
        return f"{picture}[{text}]({repository}/{view}/{tag}/{path}{anchor or ''})"

    return LINK.sub(absolute, readme)


def project_urls(repository: str) -> str:
    """The table of ``pyproject.toml`` that names the addresses of the project.

    Args:
        repository: The address of the repository at GitHub.
    """
    owner, name = repository.removeprefix("https://github.com/").split("/")
    addresses = {
        "Documentation": f"https://{owner}.github.io/{name}/",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    return "[project.urls]\n" + "".join(f'{title} = "{address}"\n' for title, address in addresses.items())


if __name__ == "__main__":
    repository, tag = sys.argv[1].rstrip("/"), sys.argv[2]
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(package_page(readme.read_text("utf-8"), repository, tag), "utf-8")
    text = project.read_text("utf-8")
    project.write_text(text.replace("[project.scripts]", f"{project_urls(repository)}\n[project.scripts]"), "utf-8")
