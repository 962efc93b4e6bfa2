"""scripts/build_site.py on made-up sites, each with one fault that it has to name."""

import json
import runpy
import tomllib

import pytest

from tests.places import ROOT

SITE = runpy.run_path(str(ROOT / "scripts" / "build_site.py"), run_name="build_site")

PAGE = (
    '<link rel="stylesheet" href="style.css"><h1 id="top">One</h1><a href="two.html#there">two</a> '
    '<a href="https://arxiv.org">paper</a> <img src="a%20picture.png" alt="a picture">'
)
WORDS = {"items": [{"title": "rope_theta", "text": "a context parallel passkey"}]}


@pytest.fixture
def site(tmp_path):
    """A site without a fault."""
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "two.html").write_text(
        '<h2 id="there">Two</h2><a href="index.html">one</a><a href="#there">up</a>'
    )
    (tmp_path / "404.html").write_text('<a href="/nowhere/">home</a>')
    (tmp_path / "style.css").write_text('a { background: url("data:image/png;base64,AA") }')
    (tmp_path / "a picture.png").write_bytes(b"")
    (tmp_path / "search.json").write_text(json.dumps(WORDS))
    (tmp_path / "search.js").write_text(f"var __index = {json.dumps(WORDS)};")
    return tmp_path


def test_a_whole_site_has_no_fault(site):
    assert list(SITE["faults"](site)) == []


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        ('<a href="three.html">', "index.html links to three.html: there is no such file"),
        ('<a href="two.html#nowhere">', "index.html links to two.html#nowhere: the page has no such heading"),
        ('<a href="#nowhere">', "index.html links to #nowhere: the page has no such heading"),
        ('<img src="gone.png" alt="gone">', "index.html loads gone.png: there is no such file"),
        ('<img src="a%20picture.png">', "index.html shows a%20picture.png without a text in its place"),
        ('<script src="https://x.org/y"></script>', "index.html loads https://x.org/y from another machine"),
        ('<link rel="icon" href="//x.org/y">', "index.html loads //x.org/y from another machine"),
        (
            '<img srcset="https://x.org/y 2x" alt="y">',
            "index.html loads https://x.org/y from another machine",
        ),
        (
            '<style>@import "https://x.org/y";</style>',
            "index.html loads https://x.org/y from another machine",
        ),
        ('<b style="background: url(//x.org/y)">', "index.html loads //x.org/y from another machine"),
        ('<pre class="mermaid">', "index.html has the class mermaid, whose library is fetched"),
    ],
)
def test_each_fault_of_a_page_is_named(site, added, fault):
    (site / "index.html").write_text(PAGE + added)
    assert list(SITE["faults"](site)) == [fault]


@pytest.mark.parametrize("name", ["style.css", "drawing.svg"])
def test_a_font_from_elsewhere_is_named(site, name):
    (site / name).write_text("<style>@font-face { src: url('https://fonts.org/a.woff2') }</style>")
    assert list(SITE["faults"](site)) == [f"{name} loads https://fonts.org/a.woff2 from another machine"]


@pytest.mark.parametrize("word", ["context parallel", "passkey", "rope_theta"])
@pytest.mark.parametrize("name", ["search.js", "search.json"])
def test_a_word_that_cannot_be_found_is_named(site, name, word):
    (site / name).write_text((site / name).read_text().replace(word, ""))
    assert list(SITE["faults"](site)) == [f"{name} does not hold {word!r}"]


def test_a_site_without_an_index_for_file_addresses_is_named(site):
    (site / "search.js").unlink()
    assert list(SITE["faults"](site)) == ["search.js is not there, and nothing can be found"]


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("CONTRIBUTING.md", "docs/log.md#a", "log.md#a"),
        ("CONTRIBUTING.md", "ARCHITECTURE.md", "architecture.md"),
        ("docs/log.md", "../CHANGELOG.md", "changelog.md"),
        ("docs/log.md", "../README.md", "index.md"),
        ("docs/log.md", "theory.md", "theory.md"),
        ("docs/how-to/a.md", "../theory.md#b", "../theory.md#b"),
        ("docs/how-to/a.md", "../../CONTRIBUTING.md", "../contributing.md"),
        ("ARCHITECTURE.md", "docs/images/a.svg", "images/a.svg"),
        ("docs/how-to/a.md", "../images/a.png", "../images/a.png"),
        ("docs/log.md", "https://x.org/a.md", "https://x.org/a.md"),
    ],
)
def test_links_lead_to_where_pages_lie_in_the_site(page, link, moved):
    assert SITE["moved"](f"[why]({link})", page) == f"[why]({moved})"


def test_a_page_and_its_place_in_the_navigation_go_together(tmp_path):
    for name in ("index.md", "how-to/a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    config = {"project": {"nav": [{"Home": "index.md"}, {"Guides": [{"B": "how-to/b.md"}]}]}}
    assert list(SITE["not_in_the_navigation"](config, tmp_path)) == [
        "zensical.toml lists how-to/b.md, which is not there",
        "how-to/a.md has no place in zensical.toml",
    ]


def test_every_page_has_its_place_in_the_site(tmp_path):
    """As `make site` begins: what is missing in zensical.toml is found by the quick tests too."""
    SITE["stage"](ROOT, tmp_path / "docs")
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    assert list(SITE["not_in_the_navigation"](config, tmp_path / "docs")) == []


@pytest.mark.slow
@pytest.mark.skipif(SITE["browser"]() is None, reason="needs Chromium")
def test_a_browser_sees_pages_that_are_too_wide_and_pictures_that_are_none(site):
    wide = '<!doctype html><body style="margin: 0"><div style="width: 500px">wide</div>'
    (site / "index.html").write_text(wide + '<img src="a%20picture.png" alt="none">')
    (site / "two.html").write_text("<!doctype html><body>narrow")
    none = "index.html shows a picture that is none: a%20picture.png"
    assert list(SITE["seen_faults"](site, SITE["browser"]())) == [
        "index.html is 500 pixels wide on a screen of 400",
        none,
        none,
    ]
