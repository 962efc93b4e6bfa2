"""The table of readers: which programs compute a checkpoint's RoPE as transformers 5 does, and how to start them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ropewalk.compatibility.llama_cpp import LLAMA_CPP
from ropewalk.compatibility.mlx_lm import MLX_LM
from ropewalk.compatibility.reader import (
    Checkpoint,
    Methods,
    Reader,
    RefusedConfigError,
    UnreadConfigError,
)
from ropewalk.compatibility.sglang import SGLANG
from ropewalk.compatibility.transformers import TRANSFORMERS_4, TRANSFORMERS_5
from ropewalk.compatibility.vllm import VLLM, VLLM_BEFORE_030
from ropewalk.errors import RopewalkError
from ropewalk.models.config.file import config_from_json, read_config_file
from ropewalk.models.config.layers import which_layers
from ropewalk.rope import RopeMethod
from ropewalk.rope.methods.longrope import RIGHT_AT_EVERY_LENGTH

READERS = (TRANSFORMERS_5, TRANSFORMERS_4, VLLM, VLLM_BEFORE_030, SGLANG, LLAMA_CPP, MLX_LM)
LIBRARIES = (TRANSFORMERS_5.key, TRANSFORMERS_4.key)
"""Programs that serve nobody."""
Verdict = Literal["same", "with an option", "long inputs only", "differs", "refuses", "not known"]
LEFT_OUT = ("attention_factor", "mscale", "mscale_all_dim")
"""Fields that decide the attention factor alone."""
FLOAT32 = 2.0**-24
"""Half a unit of float32, in which the programs compute: a smaller relative difference has no effect in them."""


@dataclass(frozen=True)
class Reading:
    """What one program makes of a checkpoint's RoPE.

    Attributes:
        key, program: as in :class:`Reader`.
        verdict: ``same``: it computes the model's frequencies; ``with an option``: with the option alone;
            ``long inputs only``: started for the whole context, it is wrong for inputs of up to ``short`` tokens.
        detail: the difference or the reason, in one phrase; empty for ``same``.
        served: tokens that it serves if no option sets the length; None if unknown or unlimited.
        launch: command that serves the model right with its whole context; None if there is none.
        option: what has to be done for ``with an option``; None otherwise.
        short: inputs of up to so many tokens differ under ``launch``, although longer ones do not; None if none do.
        launch_short: command that serves inputs of up to ``short`` tokens right; None if there is none.
    """

    key: str
    program: str
    verdict: Verdict
    detail: str = ""
    served: int | None = None
    launch: str | None = None
    option: str | None = None
    short: int | None = None
    launch_short: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Which inputs, in words, and the command that is right for them; no words if all inputs have one command."""
        if self.short is None:
            command = self.option or self.launch
            return [] if command is None else [("", command)]
        found = [
            ("first", self.option),
            (f"inputs above {self.short:,} tokens", self.launch),
            (f"inputs up to {self.short:,} tokens", self.launch_short),
        ]
        return [(inputs, command) for inputs, command in found if command is not None]


def readings(model: str, name: str | None = None) -> list[Reading]:
    """What every program makes of a checkpoint.

    Args:
        model: folder, ``config.json`` or Hub id.
        name: the checkpoint in commands; None for ``model``.

    Raises:
        RopewalkError: if the config cannot be read.
    """
    return readings_of(checkpoint_of(read_config_file(model), model), model if name is None else name)


def checkpoint_of(raw: Mapping[str, Any], model: str = "the model") -> Checkpoint:
    """The contents of a ``config.json`` as the readers need them."""
    config = config_from_json(raw, model)
    inner = raw.get("text_config")
    if config.max_position_embeddings is None:
        raise RopewalkError(
            f"the config of {model} states no max_position_embeddings, so its context length is unknown; write "
            "max_position_embeddings into config.json"
        )
    # The readers look for the length at the top of the config, also where it comes from a default or a nested part.
    completed = {**config.values, "max_position_embeddings": config.max_position_embeddings}
    return Checkpoint(inner if isinstance(inner, Mapping) else raw, completed)


def readings_of(checkpoint: Checkpoint, model: str) -> list[Reading]:
    """What every program makes of a checkpoint that was read."""
    return [_reading(reader, checkpoint, model) for reader in READERS]


def _reading(reader: Reader, checkpoint: Checkpoint, model: str) -> Reading:
    try:
        theirs = reader.methods(checkpoint)
    except RefusedConfigError as error:
        return Reading(reader.key, reader.program, "refuses", str(error))
    except UnreadConfigError as error:
        return Reading(reader.key, reader.program, "not known", str(error))
    length = checkpoint.length
    pairs, others = _compared_layers(reader, checkpoint, theirs)
    found = [text for own, other in pairs if (text := difference(own, other, length, reader.fixed))]
    served, launch = reader.served(checkpoint), reader.launch(model, checkpoint)
    changed = [instead(own, other) for own, other in pairs] if found else []
    detail = "; ".join(dict.fromkeys(filter(None, [others, *changed, *found])))
    switches = [own.switch_length for own, _ in pairs]
    short = next((tokens for tokens in switches if tokens is not None and tokens < length), None)
    # A program that is started for one length has the factors that are right for the inputs that need them.
    right = not others and not (found and any(difference(own, other, length) for own, other in pairs))
    option = None if right else reader.option(model, checkpoint)
    if not right and option is None:
        return Reading(reader.key, reader.program, "differs", detail, served)
    verdict: Verdict = "same" if right else "with an option"
    if short is None:
        return Reading(reader.key, reader.program, verdict, detail, served, launch, option)
    if reader.chooses == "input":
        detail = f"the factors change when a sequence passes {short:,} tokens, and cached keys keep the earlier ones"
        return Reading(reader.key, reader.program, verdict, detail, served, launch, option)
    wrong = _wrong_when_short(reader, [own for own, _ in pairs], length, short)
    return Reading(
        reader.key,
        reader.program,
        "long inputs only" if right else verdict,
        wrong if right else f"{detail}; then {wrong}",
        served,
        launch,
        option,
        short,
        reader.launch_short(model, short),
    )


def _compared_layers(
    reader: Reader, checkpoint: Checkpoint, theirs: Methods
) -> tuple[list[tuple[RopeMethod, RopeMethod]], str]:
    """The model's and the program's method of each layer that both rotate, each pair once; and how others differ.

    Layer types that no layer has may be missing from a program's methods, and a method that nothing rotates by, as of a
    model without RoPE, decides nothing.
    """
    ours, length = checkpoint.methods(), checkpoint.length
    pairs: dict[tuple[RopeMethod, RopeMethod], None] = {}
    rotating: tuple[list[int], list[int]] = ([], [])
    for number, ((kind, own), other) in enumerate(
        zip(checkpoint.layers, reader.rotates(checkpoint), strict=True)
    ):
        method = ours[kind]
        read = theirs.get(kind, theirs.get(None, method))
        turned = own and not _stands_still(method, length), other and not _stands_still(read, length)
        for there, turns in zip(rotating, turned, strict=True):
            if turns:
                there.append(number)
        if all(turned):
            pairs[method, read] = None
    if rotating[0] == rotating[1]:
        return list(pairs), ""
    model, program = (
        which_layers(numbers, len(checkpoint.layers)) if numbers else "no layer" for numbers in rotating
    )
    return list(pairs), f"it rotates {program}, and the model rotates {model}"


def _stands_still(method: RopeMethod, length: int) -> bool:
    """Whether a method changes no query and no key, in float32."""
    inv_freq, attention_factor = method.frequencies(length)
    return attention_factor == 1 and float(inv_freq.max()) * length < FLOAT32


def _wrong_when_short(reader: Reader, ours: Sequence[RopeMethod], length: int, short: int) -> str:
    """What a program makes of short inputs that has the model's own lists, and chooses between them otherwise."""
    parts = [difference(method, method, length, fixed=True) for method in ours]
    apart = "; ".join(dict.fromkeys(filter(None, parts)))
    if reader.chooses == "pass":
        return (
            f"takes the long factors also for inputs of up to {short:,} tokens that are batched with longer ones: "
            f"{apart}"
        )
    return (
        f"takes the long factors also for inputs of up to {short:,} tokens if its context is longer: {apart}"
    )


def difference(ours: RopeMethod, theirs: RopeMethod, length: int, fixed: bool = False) -> str:
    """How a program's RoPE differs from the model's, in one phrase; empty if it does not.

    Args:
        ours: the model's method.
        theirs: the method that the program computes.
        length: longest input, in tokens.
        fixed: whether the program takes the frequencies of the longest input for every input.
    """
    switch = ours.switch_length
    # longrope has other factors for short inputs, so both ranges are compared.
    lengths = [length] if switch is None or switch >= length else [switch, length]
    parts = []
    for tokens in lengths:
        own = ours.frequencies(tokens)
        other = theirs.frequencies(length if fixed else tokens)
        apart = (own.inv_freq - other.inv_freq).abs()
        where = "" if len(lengths) == 1 else f" up to {tokens:,} tokens" if tokens == switch else " beyond"
        if bool((apart > FLOAT32 * own.inv_freq).any()):
            # An error of a frequency grows with the position, so it is given as the angle at the last one.
            worst = float(apart.max()) * tokens
            parts.append(f"angles off by up to {worst:.3g} rad at {tokens:,} tokens")
        if not math.isclose(own.attention_factor, other.attention_factor, rel_tol=FLOAT32):
            parts.append(
                f"attention factor {other.attention_factor:.6g}, not {own.attention_factor:.6g}{where}"
            )
    return ", ".join(dict.fromkeys(parts))


def instead(ours: RopeMethod, theirs: RopeMethod) -> str:
    """What a program computes instead of the model's method, in the words of a config; empty if that is the method.

    The attention factor is left out, because :func:`difference` states the two that are computed.
    """
    if type(ours) is not type(theirs):
        return f"it computes RoPE type {theirs.name!r} with rope_theta {theirs.rope_theta:.10g}, not {ours.name!r}"
    parts = []
    for field in fields(ours):
        own, other = getattr(ours, field.name), getattr(theirs, field.name)
        if own == other or field.name in LEFT_OUT:
            continue
        parts.append(
            f"other values of {field.name}"
            if isinstance(own, tuple)
            else f"{field.name} {_value(other)}, not {_value(own)}"
        )
    return f"it computes {ours.name} with {', '.join(parts)}" if parts else ""


def _value(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value).lower()


def require_known(programs: Sequence[str]) -> None:
    """Raise for the first program that has no reader.

    Raises:
        RopewalkError: names it, and all that there are.
    """
    keys = [each.key for each in READERS]
    for program in programs:
        if program not in keys:
            raise RopewalkError(f"unknown program {program!r}; choose from {', '.join(keys)}")


def refuse_wrong(found: Sequence[Reading], programs: Sequence[str]) -> None:
    """Raise for the first of these programs that cannot be started so that it computes the model's RoPE.

    A program that is right for short and for long inputs, but with two commands, is not refused: servers of longrope
    models are usually started for one of the two, and Phi-3 takes no other method. :func:`cautions` has the sentence
    for the user. One that no command makes right for short inputs is refused.

    Args:
        found: result of :func:`readings`.
        programs: keys of programs, such as ``vllm``.

    Raises:
        RopewalkError: if a program is unknown, or reads the checkpoint wrongly, or it is not known how.
    """
    require_known(programs)
    by_key = {each.key: each for each in found}
    for program in programs:
        reading = by_key[program]
        unserved = reading.short is not None and reading.launch_short is None
        if unserved or reading.verdict in ("differs", "refuses", "not known"):
            right = [each.key for each in found if each.verdict == "same"]
            remedy = (
                "make longrope's short_factor equal to its long_factor, or extend the model with yarn or a new "
                "rope_theta"
                if unserved
                else "extend the model with a new rope_theta, which every program computes correctly"
            )
            raise RopewalkError(
                f"{_wrong(reading)}; use a program that computes it correctly ({', '.join(right)}), or {remedy}"
            )


def _wrong(reading: Reading) -> str:
    if reading.verdict == "not known":
        return f"it is not known whether {reading.program} computes this RoPE correctly ({reading.detail})"
    if reading.verdict == "refuses":
        return f"{reading.program} refuses this RoPE ({reading.detail})"
    return f"{reading.program} computes this RoPE wrongly ({reading.detail})"


def cautions(found: Sequence[Reading], programs: Sequence[str]) -> list[str]:
    """One sentence for each of these programs that needs one command for short inputs and another for long ones."""
    chosen = [each for each in found if each.key in programs and each.short is not None]
    return [f"{each.program}: {_told(each)}" for each in chosen]


def sentences(found: Sequence[Reading], length: int) -> list[str]:
    """What programs make of a checkpoint, one sentence each: first those that compute the same frequencies.

    Args:
        found: result of :func:`readings`.
        length: ``max_position_embeddings`` of the checkpoint, in tokens.
    """
    same = [each.program for each in found if each.verdict == "same"]
    told = [f"{', '.join(same)}: the same frequencies"] if same else []
    told += [f"{each.program}: {_told(each)}" for each in found if each.detail]
    return told + _other_lengths(found, length) + _remedy(found)


def wrong_servers(found: Sequence[Reading], length: int) -> list[str]:
    """What servers do not compute as the model does, or do not serve without an option, one sentence each."""
    fine = ("same", "not known")
    wrong = [each for each in found if each.verdict not in fine and each.key not in LIBRARIES]
    told = [f"served by {each.program}: {_told(each)}" for each in wrong]
    return told + _other_lengths(found, length) + _remedy(found)


def _other_lengths(found: Sequence[Reading], length: int) -> list[str]:
    return [
        f"{each.program} serves {each.served:,} tokens by default, not {length:,}; to serve {length:,}, run: "
        f"{each.launch}"
        for each in found
        # A program with two commands has named the length of each.
        if each.served not in (None, length) and each.launch is not None and each.short is None
    ]


def _remedy(found: Sequence[Reading]) -> list[str]:
    return [RIGHT_AT_EVERY_LENGTH] if any(each.short is not None for each in found) else []


def _told(reading: Reading) -> str:
    if reading.short is not None:
        told = "; ".join(f"{inputs}: {command}" for inputs, command in reading.commands)
        return f"{reading.detail}; {told}" + (
            "" if reading.launch_short else "; no command gives these inputs the short factors"
        )
    if reading.verdict == "with an option":
        return f"{reading.detail}; correct with: {reading.option}"
    if reading.verdict in ("differs", "same"):
        return reading.detail
    return f"{reading.verdict}, {reading.detail}"
