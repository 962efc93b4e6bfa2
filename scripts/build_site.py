"""Build the documentation site into build/site, and check what was built.

python scripts/build_site.py

The site's pages are those of docs/, and ARCHITECTURE.md, CHANGELOG.md and CONTRIBUTING.md of the checkout's top, whose
links are rewritten to where the pages lie in the site. zensical.toml says the rest.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "zensical.toml"
TOP_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
HOME = {"README.md": "index.md"}
"""The README is the home of the checkout as index.md is of the site."""
WORDS = ("context parallel", "passkey", "rope_theta")
"""What a search has to find, as a proof that the index is whole."""

WIDTHS = (400, 1400)
"""Widths in pixels of a narrow and of a wide screen: no page scrolls sideways on either."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MEASURE = """<!doctype html><body><script>(async () => {
  const found = [];
  for (const width of WIDTHS) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
    frame.src = page;
    await new Promise(loaded => { frame.onload = loaded; document.body.append(frame); });
    const { documentElement: whole, images } = frame.contentDocument;
    const name = decodeURI(page.slice(SITE.length));
    if (whole.scrollWidth > width) found.push(`${name} is ${whole.scrollWidth} pixels wide on a screen of ${width}`);
    for (const image of images) {
      const source = image.getAttribute("src");
      await image.decode().catch(() => found.push(`${name} shows a picture that is none: ${source}`));
    }
    frame.remove();
  }
  document.body.textContent = JSON.stringify({ found });
})()</script></body>"""
"""A page that shows each page of the site in a frame, and writes down what is too wide or is no picture."""

LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src",),
    "input": ("src",),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src",),
    "track": ("src",),
    "video": ("poster", "src"),
}
"""Attributes whose file a browser loads by itself."""
FETCHED = ("mermaid", "glightbox")
"""Classes of elements for which the theme's own script fetches a library from a public server."""
LINK = re.compile(r"(\]\()([^)#:\s]+\.(?:md|svg|png))((?:#[^)\s]*)?\))")
CSS_ADDRESS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


def moved(text: str, page: str) -> str:
    """A page's text with its links to other pages and pictures rewritten to where these lie in the site.

    Args:
        text: Markdown.
        page: the page's path in the checkout, with slashes: ``CONTRIBUTING.md`` or ``docs/how-to/x.md``.
    """
    here = posixpath.dirname(place_of(page))

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
        return f"{link[1]}{posixpath.relpath(place_of(target), here or '.')}{link[3]}"

    return LINK.sub(rewritten, text)


def place_of(page: str) -> str:
    """Where a page of the checkout lies in the site's sources."""
    if page in TOP_PAGES:
        return page.lower()
    return HOME.get(page, page.removeprefix("docs/"))


def stage(root: Path, folder: Path) -> None:
    """Copy docs/ and the pages of the top into a folder, each with its links as they are there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "docs", folder)
    for path in [*sorted((root / "docs").rglob("*.md")), *(root / name for name in TOP_PAGES)]:
        page = path.relative_to(root).as_posix()
        (folder / place_of(page)).write_text(moved(path.read_text(encoding="utf-8"), page), encoding="utf-8")


@dataclass
class Page(HTMLParser):
    """What a built page holds that can be wrong."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._in_style = False

    @classmethod
    def read(cls, path: Path) -> Page:
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.fetched += [word for word in FETCHED if word in values.get("class", "").split()]
        self.styles += [values["style"]] if "style" in values else []
        self._in_style = tag == "style"
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "img" and not values.get("alt", "").strip():
            self.unnamed.append(values.get("src", ""))
        self.loaded += [values[name] for name in LOADED.get(tag, ()) if values.get(name)]
        self.loaded += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def faults(site: Path) -> Iterator[str]:
    """What is wrong with a built site, a sentence each."""
    pages = {path.resolve(): Page.read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        # Any path may show the page of a missing one, so it has addresses of the site's root alone.
        if name == "404.html":
            continue
        for target in page.links:
            if not urlsplit(target).scheme and (why := missing(path, target, pages)):
                yield f"{name} links to {target}: {why}"
        for target in page.loaded:
            if is_elsewhere(target):
                yield f"{name} loads {target} from another machine"
            elif not target.startswith("data:") and (why := missing(path, target, pages)):
                yield f"{name} loads {target}: {why}"
        yield from (f"{name} loads {each} from another machine" for each in addresses("\n".join(page.styles)))
        yield from (f"{name} has the class {word}, whose library is fetched" for word in page.fetched)
        yield from (f"{name} shows {source} without a text in its place" for source in page.unnamed)
    for path in sorted(site.rglob("*.css")) + sorted(site.rglob("*.svg")):
        for each in addresses(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site).as_posix()} loads {each} from another machine"
    yield from missing_words(site)


def is_elsewhere(target: str) -> bool:
    return urlsplit(target).scheme in ("http", "https") or target.startswith("//")


def addresses(css: str) -> list[str]:
    """What a style sheet loads from other machines."""
    return CSS_ADDRESS.findall(css)


def missing(path: Path, target: str, pages: dict[Path, Page]) -> str:
    """Why a link within the site leads nowhere; nothing if it leads somewhere."""
    parts = urlsplit(target)
    place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not place.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and place in pages and anchor not in pages[place].anchors:
        return "the page has no such heading"
    return ""


def missing_words(site: Path) -> Iterator[str]:
    """Words that a search would not find, on disk or from a server."""
    for name in ("search.json", "search.js"):
        path = site / name
        if not path.is_file():
            yield f"{name} is not there, and nothing can be found"
            continue
        text = path.read_text(encoding="utf-8")
        items = json.loads(text[text.index("{") : text.rindex("}") + 1])["items"]
        found = " ".join(f"{item['title']} {item['text']}" for item in items).lower()
        yield from (f"{name} does not hold {word!r}" for word in WORDS if word not in found)


def not_in_the_navigation(config: dict, folder: Path) -> Iterator[str]:
    """Pages without a place in the navigation, and places without a page."""
    listed = sorted(pages_in(config["project"]["nav"]))
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    yield from (f"zensical.toml lists {page}, which is not there" for page in listed if page not in there)
    yield from (f"{page} has no place in zensical.toml" for page in there if page not in listed)


def pages_in(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict | list):
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(each)


def seen_faults(site: Path, browser: str) -> Iterator[str]:
    """What only a browser can tell: pages that scroll sideways, pictures that it cannot show."""
    pages = [path.resolve().as_uri() for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    values = {"WIDTHS": WIDTHS, "PAGES": pages, "SITE": f"{site.resolve().as_uri()}/"}
    script = MEASURE
    for name, value in values.items():
        # Not the value itself: backslashes in a replacement would be read.
        script = json.dumps(value).join(re.split(rf"\b{name}\b", script))
    with TemporaryDirectory() as folder:
        page = Path(folder) / "measure.html"
        page.write_text(script, encoding="utf-8")
        # The virtual clock stands still while a frame loads, so that the answer does not depend on the machine's speed.
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files")
        size = (f"--window-size={max(WIDTHS) + 100},1000", "--virtual-time-budget=3600000")
        command = [browser, *options, *size, f"--user-data-dir={folder}/profile", "--dump-dom", page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    body = re.search(r"<body>(\{.*\})</body>", shown, re.DOTALL)
    if body is None:
        # A browser that does not run here says nothing about the pages.
        print(f"{browser} did not show the pages; their widths and pictures were not measured")
        return
    yield from json.loads(html.unescape(body[1]))["found"]


def browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def main() -> None:
    config = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    sources, site = (ROOT / config["project"][name] for name in ("docs_dir", "site_dir"))
    stage(ROOT, sources)
    found = list(not_in_the_navigation(config, sources))
    if not found:
        shutil.rmtree(site, ignore_errors=True)
        built = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=False
        )
        if built.returncode:
            sys.exit("the site is not built: zensical names what is wrong above")
        found = list(faults(site))
        if program := browser():
            found += seen_faults(site, program)
        else:
            print("no Chromium: widths and pictures are not looked at", file=sys.stderr)
    for fault in found:
        print(fault, file=sys.stderr)
    if found:
        sys.exit(f"the site has {len(found)} faults")
    print(
        f"{site.relative_to(ROOT)}/index.html: {sum(1 for _ in site.rglob('*.html'))} pages without a fault"
    )


if __name__ == "__main__":
    main()
