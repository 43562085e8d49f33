"""Recurrent states: what of a layer's state lies where in a block of vLLM's, and which of it a rank holds.

vLLM keeps the last inputs of a layer's convolution and its recurrent state one after the other at the begin of a block.
Ranks split the convolution's channels section by section, and the state by heads.
"""

from math import prod
from typing import Any

from kvd.errors import ErrorCode, KvdError, refusal
from kvd.layout.presets import Recurrent, Section

MOVED = ("MAMBA1", "MAMBA2", "GDN_ATTN")
"""Kinds of states by vLLM's names; the last are gated delta nets, and Kimi's (KDA) with them."""


def check_states(spec: Any) -> None:
    """Refuses states of a kind that kvd does not know.

    Raises:
        BadRequest: `BAD_SPEC`.

    """
    kind = spec.mamba_type.name
    if kind not in MOVED:
        raise bad_spec(f"states of kind {kind} are not supported, only {', '.join(MOVED)}; serve without kvd")
    if len(spec.shapes) != 2:
        text = f"states of kind {kind} in {len(spec.shapes)} parts: kvd moves a convolution's inputs and a state"
        raise bad_spec(f"{text}; serve without ReplaySSM and RecoverSSM")
    if spec.num_speculative_blocks:
        text = (
            f"{spec.num_speculative_blocks} drafted tokens a step beside recurrent states are not supported: vLLM then"
        )
        text += " keeps a state for each, and which of them counts depends on how many drafts were accepted"
        raise bad_spec(f"{text}; serve without speculative decoding or without kvd")
    if spec.tp_replicated:
        raise bad_spec(f"states of kind {kind} of which every rank holds the whole are not supported")


def recurrent(spec: Any, ranks: int, groups: int, *, channels_first: bool) -> Recurrent:
    """The state of a layer with this vLLM spec, over all of `ranks`.

    `groups` is how many groups share B and C of Mamba2, over all ranks; others do not need it. `channels_first` says
    whether channels or taps are the outer dimension of the convolution's inputs (`VLLM_SSM_CONV_STATE_LAYOUT`).

    Raises:
        BadRequest: `BAD_SPEC`, the shapes are not those of a kind of state that kvd knows.

    """
    check_states(spec)
    conv, state = spec.shapes
    channels, taps = conv if channels_first else reversed(conv)
    conv_bytes, state_bytes = (dtype.itemsize for dtype in spec.dtypes)
    sections = _sections(spec, channels, ranks, groups)
    held = sum(max(1, section.parts // ranks) * section.width for section in sections)
    if held != channels:
        text = f"a state of kind {spec.mamba_type.name} with shapes {spec.shapes} on each of {ranks} ranks"
        raise bad_spec(f"{text}: its {channels} channels are not {held}, as {sections} have there")
    return Recurrent(
        sections,
        taps=taps,
        ssm_heads=state[0] * ranks,
        ssm_head_bytes=prod(state[1:]) * state_bytes,
        channel_bytes=conv_bytes,
        conv_order="head tap" if channels_first else "tap head",
    )


def _sections(spec: Any, channels: int, ranks: int, groups: int) -> tuple[Section, ...]:
    """The sections of the convolution's channels over all ranks, of which one holds `channels`."""
    kind, (heads, *inner) = spec.mamba_type.name, spec.shapes[1]
    if kind == "MAMBA1":
        return (Section("x", heads * ranks, 1),)
    width, size = inner
    if kind == "MAMBA2":
        return Section("x", heads * ranks, width), Section("B", groups, size), Section("C", groups, size)
    keys = (channels - heads * width) // (2 * size)
    return Section("q", keys * ranks, size), Section("k", keys * ranks, size), Section("v", heads * ranks, width)


def bad_spec(text: str) -> KvdError:
    """The refusal of a cache that kvd cannot move."""
    return refusal(ErrorCode.BAD_SPEC, text)
