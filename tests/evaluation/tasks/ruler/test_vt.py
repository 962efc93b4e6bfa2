"""Variable tracking: the published prompt, and statements that chain."""

from ropewalk.evaluation.tasks.ruler.vt import answered, chain_statements, tracking_prompt


def test_variable_tracking():
    text, prefix = tracking_prompt("NOISE", "12345", 5)
    assert text == (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\nNOISE\n"
        "Question: Find all variables that are assigned the value 12345 in the text above."
    )
    assert prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
        "value 12345, they are: "
    )
    assert answered("TEXT", "PREFIX: ", ["AAA", "BBB"]) == "TEXTPREFIX:  AAA BBB"


def test_statements_after_the_first_end_in_a_space():
    assert chain_statements(["ABCDE", "FGHIJ", "KLMNO"], "12345") == [
        "VAR ABCDE = 12345",
        "VAR FGHIJ = VAR ABCDE ",
        "VAR KLMNO = VAR FGHIJ ",
    ]
