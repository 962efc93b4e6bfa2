"""Every rule says what it sets or why not, and where it comes from."""

import json

from ropewalk.planning import compare_settings
from ropewalk.rope import candidates
from ropewalk.rope.theory import SEARCH_LIMIT, context_bound
from tests.planning.planning_cases import LLAMA_2


def test_every_rule_says_what_it_sets_or_why_not_and_where_it_comes_from() -> None:
    settings = compare_settings(LLAMA_2, 4096, 16384)
    assert {setting.rule for setting in settings} == set(candidates()) - {
        "recommended",
        "lower-bound",
        "none",
    }
    for setting in settings:
        assert (setting.method is None) == (setting.reason is not None)
        assert setting.formula
        assert setting.source
        assert setting.caveat
        if setting.method is not None:
            bound = context_bound(setting.method.frequencies(16384).inv_freq)
            assert setting.context_bound == (SEARCH_LIMIT if bound is None else bound)
            assert setting.reaches_target == (setting.context_bound >= 16384)
    assert json.loads(json.dumps([setting.to_json() for setting in settings]))[0]["rule"] == "current"
