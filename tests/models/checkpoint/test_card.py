"""Metadata of cards, and which cards are this program's own."""

import pytest

from ropewalk.models.checkpoint.card import card_metadata, is_own_card, signed_card


def test_metadata_are_read():
    assert card_metadata("---\nlicense: mit\ntags: [a]\n---\n# A model\n") == {
        "license": "mit",
        "tags": ["a"],
    }
    assert card_metadata("\ufeff---\r\nlicense: mit\r\n---\r\n") == {"license": "mit"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# no metadata",
        "---\na: [\n---\n",
        "---\n- a list\n---\n",
        "---\nlicense: mit\n",
        "\n---\na: 1\n---\n",
    ],
)
def test_a_card_without_readable_metadata_says_nothing(text):
    assert card_metadata(text) == {}


@pytest.mark.parametrize("text", ["", "a", "a\n", "<!-- ropewalk " + "0" * 64 + " -->\n"])
def test_a_signed_card_is_recognised_until_it_is_edited(tmp_path, text):
    path = tmp_path / "README.md"
    path.write_text(signed_card(text))
    assert is_own_card(path)
    path.write_text("b" + signed_card(text))
    assert not is_own_card(path)
    path.write_text(text)
    assert not is_own_card(path)
