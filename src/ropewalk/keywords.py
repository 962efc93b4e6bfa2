"""Keywords of each job and the values that they take, for type checkers and editors.

Written by scripts/job_keywords.py from the settings; :mod:`ropewalk.io.calls` reads the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from ropewalk.io.settings import Settings


class InspectKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.inspect`."""

    explain: bool
    from_length: str | int | None
    pretrained_length: str | int | None
    readers: bool
    target: str | int | None


class InitKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.init`."""

    documents: Sequence[str] | str | PathLike[str]
    dry_run: bool
    gpu: (
        str
        | Literal["h100", "h200", "a100", "b200", "b300", "mi300x", "4090", "5090", "l40s", "a6000"]
        | None
    )
    gpus: int | None
    memory_gb: float | None
    out: str | PathLike[str]
    rule: str | None
    target: str | int
    text_field: str | None


class PlanKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.plan`."""

    attention_efficiency: float | None
    document_length: str | int | None
    gpu: str | Literal["h100", "h200", "a100", "b200", "b300", "mi300x", "4090", "5090", "l40s", "a6000"]
    gpus: int | None
    gpus_per_node: int
    host_memory_gb: float | None
    matmul_efficiency: float
    measured: str | PathLike[str] | None
    memory_efficiency: float
    memory_gb: float | None
    overrides: str | Sequence[str] | Mapping[str, Any]
    price: float | None
    set: str | Sequence[str] | Mapping[str, Any]
    tflops: float | None


class PackKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.pack`."""

    address: str | None
    anchor_token: str | None
    bos: Literal["auto", "document", "row", "none"]
    bos_token: str | None
    chunk_cuts: str | Sequence[float]
    chunk_max: str | int
    chunk_min: str | int
    chunk_parts: str | Sequence[int] | int
    cut_points: str | Sequence[float]
    documents: int
    documents_above: str | int | None
    documents_up_to: str | int | None
    drop_gzip_high: float
    drop_gzip_low: float
    engine: Literal["embedded", "ray"]
    eos: bool
    eos_token: str | None
    fraction: float
    interleave: Mapping[str, Any] | Settings | bool | None
    length: str | int
    length_shares: str | Sequence[Sequence[str | int | float]] | Sequence[str | int | float] | None
    long_documents: Literal["split", "truncate", "skip"]
    long_factor: float | None
    long_from: str | int | None
    long_share: float | None
    max_epochs: float
    max_length: str | int
    min_length: str | int
    mixture: Mapping[str, Any] | Settings
    out: str | PathLike[str] | None
    packing: Literal["sequential", "best_fit"]
    parts: str | Sequence[int] | int
    pattern: Literal["full", "intra_document", "anchor"]
    per: Literal["source", "corpus"]
    positions: Literal["continuous", "reset"]
    preset: Literal["olmo3"] | None
    remainder: Literal["drop", "pad"]
    rows: Mapping[str, Any] | Settings
    seed: int
    shard: Sequence[int] | str
    shares: str | Mapping[str, float] | None
    shortage: Literal["refuse", "cap"]
    shuffle: bool
    synthetic_loss: Literal["all", "answers"]
    synthetic_share: str | Mapping[str, float] | None
    synthetic_tasks: str | Sequence[Literal["needle", "count"]] | Literal["needle", "count"]
    tag: str | None
    token_store: str | PathLike[str] | None
    tokenizer: str | PathLike[str]
    tokens: str | int | None
    total_tokens: str | int | None
    validation: Mapping[str, Any] | Settings
    validation_documents: int
    validation_fraction: float
    weights: str | Mapping[str, float] | None
    withheld: Sequence[int] | int
    work: Mapping[str, Any] | Settings
    workers: int


class SearchKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.search`."""

    algorithm: Literal["cma-es", "evolution"]
    attention_factor: float | None
    batch: int
    budget: int
    device: str
    documents: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    held_out: int
    largest: float | None
    objective: Literal["perplexity", "needle"]
    out: str | PathLike[str] | None
    prefill_chunk: str | int | None
    racing: bool
    resume: bool
    seed: int
    settings: Mapping[str, Any] | Settings
    short_penalty: float
    space: Literal["all-pairs", "critical-dimension"]
    start_tokens: int | str | Sequence[int]
    target_length: str | int
    text: str | PathLike[str]
    to: str | int


class ExtendKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.extend`."""

    from_stage: int | None
    overrides: str | Sequence[str] | Mapping[str, Any]
    resume: bool
    rope: Sequence[str | PathLike[str]] | str | PathLike[str]
    set: str | Sequence[str] | Mapping[str, Any]


class EvaluateKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.evaluate`."""

    average: bool
    batch_size: int
    benchmark_data: str | Mapping[str, str | PathLike[str]]
    beyond_config: bool
    chat: bool
    compat: Literal["none", "nvidia"]
    concurrency: int
    depths: int
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    endpoint: Literal["completions", "chat"]
    engine: str
    essays: str | PathLike[str] | None
    evaluator: str | None
    exact_rope: bool
    exclude: str | Sequence[str]
    extra: str | Mapping[str, Any]
    harness: str | Mapping[str, str | PathLike[str]]
    harness_limit: int | None
    harness_names: str | Sequence[str]
    harness_run: Mapping[str, Any] | Settings
    harness_tasks: str | PathLike[str] | None
    haystack: Literal["noise", "essay", "embedded"]
    hotpotqa: str | None
    last: int
    lengths: str | Sequence[str | int] | str | int | Mapping[str, str | Sequence[str | int] | str | int]
    lines: str | Sequence[int] | int
    lm_eval: Mapping[str, Any] | Settings
    lm_eval_data: str | Mapping[str, str | PathLike[str]]
    lm_eval_include: str | PathLike[str] | None
    lm_eval_limit: int | None
    lm_eval_tasks: str | Sequence[str]
    loading: Mapping[str, Any] | Settings
    longeval: Mapping[str, Any] | Settings
    longppl: Mapping[str, Any] | Settings
    most_windows: int | None
    needle: Mapping[str, Any] | Settings
    out: str | PathLike[str] | None
    parallel: str | None
    perplexity: Mapping[str, Any] | Settings
    position_bins: int | None
    prefill_chunk: str | int
    prose: Mapping[str, Any] | Settings
    published: Mapping[str, Any] | Settings
    questions: Mapping[str, Any] | Settings
    retries: int
    rope: str | PathLike[str] | None
    rows: int
    ruler: Mapping[str, Any] | Settings
    same_model: bool
    samples: int | None
    samples_dir: str | PathLike[str] | None
    seed: int
    send: Literal["auto", "ids", "text"]
    server: str
    server_extra: str | Mapping[str, Any]
    server_model: str | None
    serving: Mapping[str, Any] | Settings | None
    short_context: str | int
    squad: str | None
    stride: int
    suite: (
        str
        | Sequence[
            Literal[
                "ruler",
                "passkey",
                "longeval",
                "needle",
                "nolima",
                "graphwalks",
                "babilong",
                "mrcr",
                "icl",
                "counting",
                "ruler2",
                "openai_mrcr",
                "google_mrcr",
                "longbench_v2",
                "longbench_pro",
                "helmet_rag",
                "helmet_rerank",
                "helmet_icl",
                "infinitebench",
                "longproc",
                "repoqa",
                "aa_lcr",
                "helmet_narrativeqa",
                "perplexity",
                "longppl",
                "short",
                "longbench",
                "lm_eval",
            ]
        ]
        | Literal[
            "ruler",
            "passkey",
            "longeval",
            "needle",
            "nolima",
            "graphwalks",
            "babilong",
            "mrcr",
            "icl",
            "counting",
            "ruler2",
            "openai_mrcr",
            "google_mrcr",
            "longbench_v2",
            "longbench_pro",
            "helmet_rag",
            "helmet_rerank",
            "helmet_icl",
            "infinitebench",
            "longproc",
            "repoqa",
            "aa_lcr",
            "helmet_narrativeqa",
            "perplexity",
            "longppl",
            "short",
            "longbench",
            "lm_eval",
        ]
    )
    suites: (
        str
        | Sequence[
            Literal[
                "ruler",
                "passkey",
                "longeval",
                "needle",
                "nolima",
                "graphwalks",
                "babilong",
                "mrcr",
                "icl",
                "counting",
                "ruler2",
                "openai_mrcr",
                "google_mrcr",
                "longbench_v2",
                "longbench_pro",
                "helmet_rag",
                "helmet_rerank",
                "helmet_icl",
                "infinitebench",
                "longproc",
                "repoqa",
                "aa_lcr",
                "helmet_narrativeqa",
                "perplexity",
                "longppl",
                "short",
                "longbench",
                "lm_eval",
            ]
        ]
        | Literal[
            "ruler",
            "passkey",
            "longeval",
            "needle",
            "nolima",
            "graphwalks",
            "babilong",
            "mrcr",
            "icl",
            "counting",
            "ruler2",
            "openai_mrcr",
            "google_mrcr",
            "longbench_v2",
            "longbench_pro",
            "helmet_rag",
            "helmet_rerank",
            "helmet_icl",
            "infinitebench",
            "longproc",
            "repoqa",
            "aa_lcr",
            "helmet_narrativeqa",
            "perplexity",
            "longppl",
            "short",
            "longbench",
            "lm_eval",
        ]
    )
    system_prompt: str | None
    tasks: str | Sequence[str]
    text: str | PathLike[str]
    thinking_tokens: int
    threshold: float
    timeout: float
    tokenizer: str | None
    trained_length: int | None
    url: str
    what: Mapping[str, Any] | Settings
    windows: int | None


class CompareKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.compare`."""

    jobs: int | None
    launch: str | None
    out: str | PathLike[str] | None
    overrides: str | Sequence[str] | Mapping[str, Any]
    part: str | None
    seeds: int
    set: str | Sequence[str] | Mapping[str, Any]
    share: str | None
    vary: str | Sequence[str] | Mapping[str, Any]


class AuditKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.audit`."""

    ablation_samples: int
    delta2: str | int
    device: str
    dtypes: str | Sequence[str]
    length: str | int | None
    random_control: bool
    samples: int
    seed: int
    shifts: str | Sequence[str | int] | str | int
    text: str | PathLike[str]


class VerifyKeywords(TypedDict, total=False):
    """Keywords of :func:`ropewalk.verify`."""

    layers: int | None
    length: str | int | None
    overrides: str | Sequence[str] | Mapping[str, Any]
    ranks: int
    rows: int
    set: str | Sequence[str] | Mapping[str, Any]
