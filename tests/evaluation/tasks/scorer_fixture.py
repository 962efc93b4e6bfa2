"""Writes scorers_upstream.json: what the published scorers give for answers of our own.

    python tests/evaluation/tasks/scorer_fixture.py SOURCES

SOURCES is a folder with the files that :data:`SCORERS` name, as published (the code of a data card as a Python file);
none of them is part of ropewalk. Only their scoring functions run. Those of RULERv2 need the package editdistance, and
those of HELMET pytrec_eval.
"""

import ast
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FIXTURE = Path(__file__).parent / "scorers_upstream.json"
MODULES = ("ast", "datetime", "difflib", "editdistance", "pytrec_eval", "re", "string")
Functions = SimpleNamespace


@dataclass(frozen=True)
class Case:
    """An answer with what its scorers see beside it."""

    answer: str
    references: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scorer:
    """A published scorer of one of our metrics: its file in SOURCES, and how its functions score a case."""

    source: str
    version: str
    license: str
    file: str
    score: Callable[[Functions, Case], float]
    inside: str = ""
    """The function whose inner functions are the scorer's; empty for those of the whole file."""


def graphwalks(published: Functions, case: Case) -> float:
    nodes, _ = published.get_list(None, case.answer)
    return float(published.grade(set(nodes), set(case.references)))


def graphwalks_lm_eval(published: Functions, case: Case) -> float:
    found = published.process_results({"answer_nodes": list(case.references)}, [case.answer])
    return float(found["f1"])


def mrcr(published: Functions, case: Case) -> float:
    return float(published.grade(case.answer, case.references[0], STRING))


def mrcr_google(published: Functions, case: Case) -> float:
    # Google's random strings have two characters more.
    answer, target = (text.replace(STRING, f"{STRING}K9") for text in (case.answer, case.references[0]))
    return float(published.mrcr_v2_metric(answer, target))


def babilong(published: Functions, case: Case) -> float:
    labels = published.TASK_LABELS[case.details["kind"]]
    return float(published.compare_answers(case.references[0], case.answer, case.details["question"], labels))


def nolima(published: Functions, case: Case) -> float:
    metric = SimpleNamespace(metric="contains")
    return float(published._evaluate_response(metric, case.answer, list(case.references)))


def helmet(published: Functions, case: Case) -> float:
    # Its configuration of these tasks (configs/icl.yaml) ends an answer with its line.
    said = published.parse_output(case.answer.partition("\n")[0], "label:")
    right = published.drqa_exact_match_score(said, case.references[0])
    return float(right)


def oolong(published: Functions, case: Case) -> float:
    kind = "NUMERIC" if case.details["kind"] in ("count", "user", "month") else "LABEL"
    point = {"answer": f"['{case.references[0]}']", "answer_type": f"ANSWER_TYPE.{kind}"}
    point |= dict.fromkeys(("id", "context_window_id", "dataset"), "")
    return float(published.synth_process_response(point, case.answer, "")["score"])


def ruler2(published: Functions, case: Case) -> float:
    return float(published.string_match_all_single(case.answer, list(case.references)))


def ruler2_last_paragraph(published: Functions, case: Case) -> float:
    return float(published.string_match_2steps_single(case.answer, list(case.references)))


def ruler2_best(published: Functions, case: Case) -> float:
    return float(published.string_match_part_single(case.answer, list(case.references)))


def ruler2_letter(published: Functions, case: Case) -> float:
    return float(published.extract_letter(case.answer) == case.references[0])


def helmet_substring(published: Functions, case: Case) -> float:
    # As for "label"; without a chat template, "Answer:" is put before the answer.
    said = f"Answer:{case.answer.partition(chr(10))[0]}"
    return max(
        float(published.drqa_metric_max_over_ground_truths(each, text, list(case.references)))
        for each in [published.substring_exact_match_score]
        for text in (said, published.parse_output(said))
    )


def helmet_ndcg(published: Functions, case: Case) -> float:
    said = f"Ranking:{case.answer.partition(chr(10))[0]}"
    ranking, right = published.parse_rankings(said), case.details["relevance"]
    found = published.calculate_retrieval_metrics({"q": ranking}, {"q": right}, [1, 5, 10])
    return float(found["NDCG@10"])


def longbench_pro(published: Functions, case: Case) -> float:
    names = {
        "ndcg": "NDCG",
        "order": "Pairwise_Accuracy",
        "first": "Accuracy",
        "f1": "F1_Score",
        "found": "SubEM",
    }
    # Its evaluation of an item: nothing is 0, and so is an assertion that fails.
    found = getattr(published, names[case.details["kind"]])(list(case.references), case.answer)
    return float(found) if case.answer != "" and found <= 1 else 0.0


SCORERS = {
    "openai": Scorer(
        "openai/graphwalks, data card",
        "with the change of 2026-02-27",
        "MIT",
        "graphwalks_card.py",
        graphwalks,
    ),
    "f1": Scorer("lm_eval, tasks/graphwalks/utils.py", "0.4.13", "MIT", "lm_eval.py", graphwalks_lm_eval),
    "mrcr": Scorer("openai/mrcr, data card", "of 2025-04-12", "MIT", "mrcr_card.py", mrcr),
    "google": Scorer(
        "google-deepmind/eval_hub, mrcr_v2/run_evaluation.py",
        "67b7fd29b2205ee0a3226e0d3e5d74140a253b42",
        "Apache-2.0",
        "eval_hub.py",
        mrcr_google,
    ),
    "babilong": Scorer(
        "booydar/babilong, babilong/metrics.py",
        "7a6efee29f5cac03c3c410e6799c80fd2ffe3610",
        "Apache-2.0",
        "babilong.py",
        babilong,
    ),
    "name": Scorer(
        "NoLiMa, evaluation/async_evaluate.py, metric contains",
        "45ae701f24fa00478de6955e6e5f21902e448bd7 of the fork ieiei/NoLiMa",
        "Adobe Research License (research only)",
        "nolima.py",
        nolima,
    ),
    "label": Scorer(
        "princeton-nlp/HELMET, utils.py",
        "4526dfbdc512bd9ff721da336bff4e3e75ecfd27",
        "MIT",
        "helmet.py",
        helmet,
    ),
    "closeness": Scorer(
        "abertsch72/oolong, src/eval/eval_helpers.py",
        "adbf1cb56a0b0c7885649ac12589f7d6e215c841",
        "MIT",
        "oolong.py",
        oolong,
    ),
    "longbench_pro": Scorer(
        "caskcsg/longcontext, LongBench-Pro/modules/utils.py",
        "88fbeb85827b78add4a5354b0c1194a57c176c38",
        "Apache-2.0 (the data; the code states none)",
        "longbench_pro.py",
        longbench_pro,
    ),
    "ruler2": Scorer(
        "NVIDIA/NeMo-Skills, nemo_skills/evaluation/evaluator/ruler.py",
        "991a7432a1e3e6374b402a96cdd8614026714a1d",
        "Apache-2.0",
        "nemo_skills.py",
        ruler2,
        "eval_ruler2",
    ),
    "ruler2_last_paragraph": Scorer(
        "NVIDIA/NeMo-Skills, nemo_skills/evaluation/evaluator/ruler.py",
        "991a7432a1e3e6374b402a96cdd8614026714a1d",
        "Apache-2.0",
        "nemo_skills.py",
        ruler2_last_paragraph,
        "eval_ruler2",
    ),
    "ruler2_best": Scorer(
        "NVIDIA/NeMo-Skills, nemo_skills/evaluation/evaluator/ruler.py",
        "991a7432a1e3e6374b402a96cdd8614026714a1d",
        "Apache-2.0",
        "nemo_skills.py",
        ruler2_best,
        "eval_ruler2",
    ),
    "ruler2_letter": Scorer(
        "NVIDIA-NeMo/Skills, nemo_skills/evaluation/evaluator/mcq.py and math_grader.py",
        "8b18f3992854bcb668095228a146e214c567b370",
        "Apache-2.0",
        "nemo_mcq.py",
        ruler2_letter,
    ),
    "helmet_substring": Scorer(
        "princeton-nlp/HELMET, utils.py",
        "4526dfbdc512bd9ff721da336bff4e3e75ecfd27",
        "MIT",
        "helmet.py",
        helmet_substring,
    ),
    "helmet_ndcg": Scorer(
        "princeton-nlp/HELMET, utils.py",
        "4526dfbdc512bd9ff721da336bff4e3e75ecfd27",
        "MIT",
        "helmet.py",
        helmet_ndcg,
    ),
}
"""By the name of our metric."""


FORMS = (
    *("{}", " {}", "{}\n", "{} \n ", "\n\n{}", "{}.", "**{}**", "`{}`", '"{}"', "({})", "\u200b{}", "{}</s>"),
    *(
        "The answer is {}.",
        "Sure! Here it is:\n{}",
        "{}\n\nI hope this helps.",
        "Answer: {}",
        "**Answer:** {}",
    ),
    *("<think>Is it {other}?</think>\n{}", "{}\n</think>\n{other}", "{} or {other}", "{other}\n{}", "{}{}"),
)


def cases(
    references: tuple[str, ...],
    pieces: Sequence[str],
    more: Sequence[str] = (),
    forms: Sequence[str] = FORMS,
    **details: Any,
) -> Iterator[Case]:
    """The first piece, which is right, and the second, half right, in all forms; then further answers as they are."""
    right, half, wrong = pieces
    said = [form.format(piece, piece, other=wrong) for piece in (right, half) for form in forms]
    said += [wrong, right.upper(), right.lower(), right.title(), right[::-1], "", " ", "\n", "I do not know."]
    for answer in dict.fromkeys([*said, *more]):
        yield Case(answer, references, details)


A, B, C, D = "0a1b2c3d", "4e5f6071", "8293a4b5", "ffffffff"
NODES = (A, B, C)
STRING = "aB3dE5gH7j"
TEXT = (
    "The ferry leaves at noon, and the lamp on the quay hums like a kettle. Two gulls argue about a crust of bread, "
    "while an old captain counts the ropes again. Nobody has asked him to, but he says that a harbor without a "
    "count is only water. At dusk he lights his pipe, writes a number on the wall, and goes home along the rails."
)
OTHER = (
    "A garden under glass keeps its own weather. The tomatoes have heard of snow, and do not believe in it. On "
    "Sundays the gardener reads to them from a book of storms, because a little fear makes them sweeter."
)
VALUES = ("4817263590", "9035172846", "1122334455", "6677889900")
WHERE = "The most recent location of Mary is {}."

CASES: Mapping[tuple[str, ...], Sequence[Case]] = {
    ("openai", "f1"): [
        *cases(
            NODES,
            [f"Final Answer: [{A}, {B}, {C}]", f"Final Answer: [{D}, {B}, {A}]", f"Final Answer: [{D}]"],
            [
                *("Final Answer: []", f"Final Answer:[{A}, {B}, {C}]", f"Final Answer:  [{A}, {B}, {C}]"),
                *(f"**Final Answer:** [{A}, {B}, {C}]", f"Final Answer: {A}, {B}, {C}"),
                *(f"Final Answer: ['{A}', '{B}', '{C}']", f'Final Answer: ["{A}", "{B}"]'),
                *(f"Final Answer: [{A}, {A}, {B}, {D}]", f"Final Answer: [{A},{B},,{C},]"),
                *(f"Final Answer: [{A}, [{B}, {C}]]", f"Final Answer: [[{A}], [{B}]]"),
                *(f"Final Answer: [{A}\n{B}\n{C}]", f"Final Answer: [{A}; {B}; {C}]", "Final Answer: [" * 50),
                *(f"Final Answer: ［{A}, {B}］", f"Final Answer: [{A}] Final Answer: [{A}, {B}, {C}]"),
                *(f"Final Answer: [{A}, {B}, {C}] as {D} is no parent", f"[{A}, {B}, {C}]"),
                *(f"Final Answer: [`{A}`, `{B}`]", f"Final Answer: [{A}, {B}, {C}]\u2028"),
            ],
        ),
        *(
            Case(said, ())
            for said in ("Final Answer: []", "Final Answer: [ ]", f"Final Answer: [{A}]", "none", "")
        ),
    ],
    ("mrcr", "google"): list(
        cases(
            (STRING + TEXT,),
            [STRING + TEXT, STRING + TEXT[:150], STRING + OTHER],
            [
                *(TEXT, STRING, STRING * 2, STRING[:9] + TEXT, STRING.lower() + TEXT, f"{STRING}\n{TEXT}"),
                *(f"{STRING} {TEXT}", STRING + TEXT.upper(), STRING + TEXT[::-1], STRING + TEXT * 2),
                *(f"{STRING}{OTHER} {STRING}{TEXT}", f"{STRING}{TEXT}{STRING}", STRING + "e" * 400),
                *(STRING + TEXT.replace("e", "é"), STRING + TEXT.replace(" ", "\u00a0"), STRING + " \n\t "),
                *(STRING + " ".join(sorted(TEXT.split())), f"{STRING}{TEXT} {OTHER}"),
            ],
        )
    ),
    ("babilong",): [
        *cases(
            ("garden",),
            [WHERE.format("garden"), "garden, kitchen", WHERE.format("kitchen")],
            [
                *("garden", "Garden", "gardens", "She left. garden", "garden. Not the kitchen", "gar-den"),
                *("garden<context>kitchen", "garden<example>kitchen", "garden Question: the kitchen?"),
                *("garden\nkitchen", "Mary is in the garden, not in the bathroom", "ｇａｒｄｅｎ", "jardín"),
                "." + WHERE.format("garden"),
            ],
            kind="qa1",
            question="Where is Mary? ",
        ),
        *cases(
            ("hallway",),
            ["Before the office the milk was in the hallway.", "hallway or garden", "the office"],
            forms=("{}", "**{}**", "{}\n", "{} or {other}"),
            kind="qa3",
            question="Where was the milk before the office? ",
        ),
        *cases(
            ("Fred",),
            ["Fred", "Fred and Jeff", "Bill"],
            ["Fred gave the milk to Mary", "Fred gave the apple to Mary", "Frederick", "alfred", "milk"],
            forms=("{}", "**{}**", "{}\n", "{} or {other}"),
            kind="qa5",
            question="Who gave the milk to Mary? ",
        ),
    ],
    ("name",): list(
        cases(
            ("Alma",),
            ["Alma", "Alma and Hugo", "Hugo"],
            ["Almas", "Palma", "PAlma", "Al ma", "A-l-m-a", "Ａｌｍａ", "Álma", "Alma " * 50, "not Alma"],
        )
    ),
    ("label",): list(
        cases(
            ("7",),
            ["label: 7", "label: 7 or 3", "label: 3"],
            [
                *("7", "Label: 7", "LABEL:7", "label: label: 7", "label:label:7", "label 7", "The label is 7"),
                *("the 7", "a 7", "7!", "#7", "[7]", "'7'", "-7", "7.0", "07", "77", "17", "7 7", "７", "seven"),
                *("Text\nlabel: 7", "The text has label: 7", "label: 3 label: 7", "label: 7\nlabel: 3", "7\t"),
                *("label:\n7", "label: **7**", "label: 7 (animals)", "7\r\n", "7\x0b3", "7\u20283", "lab\u00adel: 7"),
            ],
        )
    ),
    ("closeness",): [
        *cases(
            ("12",),
            ["Answer: 12", "Answer: 10", "Answer: 48"],
            [
                *("12", "12 instances", "Answer: 12 instances", "There are 12", "I count a total of 12", "12."),
                *("In all lines together I have counted 12", "Answer: +12", "Answer: -12", "Answer: 012"),
                *("I had counted it 12", "I have counted it 12", "Answer: 1_2", "Answer: １２", "Answer: 12.0"),
                *("Answer: 1,2", "Answer: twelve", "Answer:"),
                *("Answer: [12]", "Answer: ** 12 **", "Answer: [ 12 ]", "Answer: 12\nNote: sure", " " * 30),
                *(f"Answer: {'9' * 30}", f"Answer: {'9' * 400}", f"Answer: {'9' * 5000}", "Answer: ²"),
            ],
            kind="count",
        ),
        *cases(
            ("48291",),
            ["Answer: 48291", "Answer: 48292", "Answer: User 48291"],
            ["48291", "Answer: [48291]", "Answer: ** 48291", "User: 48291", "The user with most is 48291", "048291"],
            forms=("{}", "**{}**", "{}\n", "{}.", "{} or {other}"),
            kind="most",
        ),
        *(
            case
            for right, wrong in (("more", "less"), ("less", "more"))
            for case in cases(
                (f"{right} common than",),
                [
                    f"Answer: {right} common than",
                    f"Answer: tools are {right} common than animals",
                    f"Answer: {wrong} common than",
                ],
                [
                    *(f"{right} common", f"Answer: {right} common", f"Answer: {right} common than animals"),
                    *(f"tools are {right} common than animals", f"Answer: tools are {right} common"),
                    *(f"Answer: tools are {wrong} common than animals", "Answer: same frequency"),
                    *(f"Answer: {right}", f"Answer: {right} common than or {wrong} common than"),
                    *("Answer: more common than or less common than", "Answer: they have the same frequency as"),
                    *(f"Answer: {right.upper()} COMMON THAN", f"Answer: this is {right} common"),
                    f"Answer: this is {right} common.",
                ],
                forms=("{}", "**{}**", "{}\n", "{}.", "{} or {other}", "{}\n\nI hope this helps."),
                kind="compare",
            )
        ),
    ],
    ("ruler2",): [
        *cases(
            VALUES[:1],
            [VALUES[0], VALUES[0][:9], VALUES[1]],
            [f"x{VALUES[0]}x", "4,817,263,590", "４８１７２６３５９０"],
        ),
        *cases(
            VALUES,
            [", ".join(VALUES), ", ".join(VALUES[:2]), VALUES[0] * 2],
            [
                *(f"{VALUES[0]} Answer: {VALUES[1]} Answer: {VALUES[2]}", f"Answer: {VALUES[0]}</think>{VALUES[1]}"),
                *(f"answer: {VALUES[0]}", "Answer:", f"{VALUES[0]}</think>", f"{VALUES[0]}</THINK>{VALUES[1]}"),
            ],
        ),
        *cases(
            ("Red House by the Sea",),
            ["the red house by the sea", "red old house by sea", "a white tower"],
            ["Red House", "Red\nHouse\nby\nthe\nSea", "red  house  by  the  sea", "sea the by house red", "x " * 40],
            forms=("{}", "Answer: {}", "{} Answer: {other}", "{}\n</think>\n{other}"),
        ),
    ],
    ("ruler2_last_paragraph", "ruler2_best"): [
        *cases(
            ("Who is it? A. one B. two", "Paris"),
            ["Who is it? A. one B. two", "who is A. one", "a tower"],
            [
                *("Document 1234567:\nParis\nParis is a city.\n\nIt is there.", "Document 1:\nParis\n\nParis"),
                *("Document 1234567:\nParis", "Document 7: Paris\n\nLyon\n\nParis", "Paris\n\nLyon", "Lyon\n\nParis"),
                *("Question 1: one\n\nParis\n\n", "Paris\n\n\nLyon", "one\r\n\r\ntwo Paris", "Answer: one\n\nParis"),
            ],
        ),
    ],
    ("ruler2_letter",): [
        *cases(
            ("B",),
            [r"\boxed{B}", r"\boxed{\text{B. two}}", r"\boxed{C}"],
            [
                *(r"\boxed{b}", r"\boxed{}", r"\boxed{ B }", r"\boxed{B", r"\boxed {B}", r"\boxed", r"\fbox{B}"),
                "boxed{B}",
                *(r"\boxed{A or B}", r"\boxed{B or K}", r"\boxed{K}", r"\boxed{{B}}", r"\boxed{B}\boxed{"),
                r"\boxed{B}}",
                *("B", "B.", "(B)", "**Answer**: B", "answer: B", "Answer:B", "Answer: Bob", "Answer: A\nAnswer: B"),
                *("The final answer is B", r"\boxed{X} Answer: B", r"\boxed} Answer: B", "Answer: _B_", "Answer: b"),
            ],
        ),
    ],
    ("helmet_substring",): [
        *cases(
            ("The Eiffel Tower", "Tour Eiffel"),
            ["the Eiffel Tower", "Eiffel", "a house"],
            [
                *("The Eiffel-Tower", "Eiffel tower!", "EIFFEL  TOWER", "Tour Eiffel", "Tour\nEiffel", "Eiffel Towers"),
                *(" Eiffel Tower in Paris", "It is the Eiffel Tower.", "Answer: Eiffel Tower", "answer:Tour Eiffel"),
                *("Eiffel a Tower", "Eiffel\u00a0Tower", "Eiffel Tówer", "an Eiffel the Tower", "TheEiffelTower"),
            ],
        ),
        *cases(("1,200 m",), ["1,200 m", "1200 m", "200"], ["1 200 m", "1.200 m", "12000 m", "1200m"], forms=("{}",)),
        *cases(("the",), ["the", "a", "x"], ["", "an", "them"], forms=("{}",)),
    ],
    ("helmet_ndcg",): [
        *cases(
            ("3 > 1 > 12 > 2",),
            ["3 > 1 > 12 > 2", "1 > 3 > 2", "2 > 4"],
            [
                *("ID3 > ID1 > ID12", "[ID: 3] > [ID: 1]", "id3>id12>id1", "3 > 3 > 1 > 12", "2 > 3 > 2 > 1"),
                "3, 1, 12",
                *("3 > 1 and 12 > 2 > 4 > 5", "99 > 3 > 1", "3 >1> 12>", "> 3 > 1", "3 > x > 1", "3\n> 1", "12", "999"),
                *("4 > 5 > 6 > 7 > 8 > 9 > 10 > 11 > 13 > 3 > 1", "4 > 5 > 6 > 7 > 8 > 9 > 10 > 11 > 13 > 14 > 3"),
                *("Document 3 > Document 1", "3 < 1 < 12", "03 > 01", "３ > １"),
                "3 > 1 > 12 > 2 > 4 > 5 > 6 > 7 > 8 > 9 > 10",
            ],
            relevance={**{str(number): 0 for number in range(4, 15)}, "3": 3, "1": 2, "12": 1, "2": 0},
        ),
        *cases(("1",), ["1", "2 > 1", "2"], ["1 > 2"], forms=("{}",), relevance={"1": 0, "2": 0}),
    ],
    ("longbench_pro",): [
        case
        for kind in ("ndcg", "order", "first", "f1", "found")
        for case in cases(
            ("Second Act", "first act", "Third  act"),
            ["second act\nfirst act\nthird act", "first act\nsecond act", "fourth act"],
            [
                *("[Answer]\nSecond act", "[Answer]Second Act\nfirst act\n\nthird act"),
                "[答案]\nsecond act\nThird act",
                *("[Answer] x [答案] second act", "[答案] x [Answer] second act", "second act\nsecond act\nfirst act"),
                *("first act\nsecond act\nfirst act\nthird act", "1. second act\n2. first act"),
                *("second act, first act", "x\ny\nsecond act", "third act\nfirst act\nsecond act"),
                *("second act\nthird act", "x\nsecond act\nthird act"),
            ],
            kind=kind,
        )
    ]
    + [
        case
        for kind in ("ndcg", "order", "first", "f1", "found")
        for references in (("7",), ("a", "a", "b"))
        for case in cases(
            references, ["7", "a\nb", "c"], ["a\na\nb", "b\na", "7\n8", "a"], ("{}", "[Answer]\n{}"), kind=kind
        )
    ],
}  # fmt: skip
"""Answers by the metrics that score them."""


def published(path: Path, inside: str) -> Functions:
    """The functions and constants of a file, without what it imports and runs."""
    tree: ast.AST = ast.parse(path.read_text())
    if inside:
        tree = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == inside)
    kept = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n is not tree]
    constants = [n for n in getattr(tree, "body", []) if isinstance(n, ast.Assign)] if not inside else []
    names: dict[str, Any] = {}
    for name in MODULES:
        with suppress(ImportError):
            names[name] = importlib.import_module(name)
    names |= {"SequenceMatcher": names["difflib"].SequenceMatcher, "datetime": names["datetime"].datetime}
    names |= {"List": list, "Tuple": tuple, "Dict": dict, "Set": set, "Counter": Counter}
    names |= {"combinations": combinations}
    for node in [*constants, *kept]:
        # Constants that need a module of the file's own are none of its scorer's.
        with suppress(NameError):
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return SimpleNamespace(**names)


def scored(scorer: Scorer, functions: Functions, case: Case) -> float | None:
    """The published score; None where Oolong's parser fails, at an answer without words."""
    with suppress(IndexError):
        return scorer.score(functions, case)
    return None


def main() -> None:
    sources = Path(sys.argv[1])
    functions = {name: published(sources / each.file, each.inside) for name, each in SCORERS.items()}
    groups = []
    for metrics, answered in CASES.items():
        for _, alike in groupby(answered, lambda case: (case.references, dict(case.details))):
            group = list(alike)
            scores = {
                case.answer: [scored(SCORERS[name], functions[name], case) for name in metrics]
                for case in group
            }
            about = {"metrics": metrics, "references": group[0].references, "details": group[0].details}
            groups.append({**about, "scores": scores})
    origins = {
        name: {key: getattr(each, key) for key in ("source", "version", "license")}
        for name, each in SCORERS.items()
    }
    FIXTURE.write_text(
        json.dumps({"scorers": origins, "groups": groups}, indent=0, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
