"""SGLang's buffers of what goes with a request beside its cache, as rows."""

import ctypes
from typing import Any

import torch

from kvd.engines.sglang.handoff import FirstToken

_OUTPUT_IDS, _LOGPROBS, _LOGPROB_IDS, _TOP_LOGPROBS, _TOP_IDS = 0, 2, 3, 4, 5
"""Of SGLang's `MetadataBuffers.get_buf_infos`; the room's number comes last, but for a checksum if it is asked for."""


class Metadata:
    """The rows of every buffer that SGLang's `args` name; `checksums` says whether the last one has checksums."""

    def __init__(self, args: Any, *, checksums: bool) -> None:
        self._rows = [
            torch.frombuffer((ctypes.c_int8 * nbytes).from_address(pointer), dtype=torch.int8).view(-1, row)
            for pointer, nbytes, row in zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)
        ]
        self._lengths = list(args.aux_item_lens)
        self._rooms = self._rows[-2 if checksums else -1]

    @property
    def record_bytes(self) -> int:
        """Bytes of a row of every buffer."""
        return sum(self._lengths)

    def copy_out(self, number: int, record: torch.Tensor) -> None:
        """Copies the rows of this number into a record."""
        record.copy_(torch.cat([rows[number] for rows in self._rows]))

    def copy_in(self, number: int, record: torch.Tensor) -> None:
        """Copies a record into the rows of this number."""
        held, offset = record.cpu(), 0
        for rows, length in zip(self._rows, self._lengths, strict=True):
            rows[number].copy_(held[offset : offset + length])
            offset += length

    def unknown_token(self, number: int, vocabulary: int) -> int | None:
        """A token in the rows of this number, first or likely, that a model of `vocabulary` tokens has not."""
        ids = (_OUTPUT_IDS, 1), (_LOGPROB_IDS, 1), (_TOP_IDS, None)
        tokens = torch.cat([self._rows[kind][number].view(torch.int32)[:length] for kind, length in ids])
        unknown = tokens[(tokens < 0) | (tokens >= vocabulary)]
        return int(unknown[0]) if len(unknown) else None

    def write(self, number: int, room: int, first: FirstToken) -> None:
        """Writes what an engine of another kind has told into the rows of this number: nothing was cached there."""
        for rows in self._rows:
            rows[number].zero_()
        self._rows[_OUTPUT_IDS][number].view(torch.int32)[0] = first.token
        self._rows[_LOGPROBS][number].view(torch.float32)[0] = first.logprob
        self._rows[_LOGPROB_IDS][number].view(torch.int32)[0] = first.token
        for place, (token, logprob) in enumerate(first.top):
            self._rows[_TOP_IDS][number].view(torch.int32)[place] = token
            self._rows[_TOP_LOGPROBS][number].view(torch.float32)[place] = logprob
        self._rooms[number].view(torch.int64)[0] = room
