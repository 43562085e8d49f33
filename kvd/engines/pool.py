"""A pool as the tensor in which an engine's cache lies."""

import torch

from kvd.client.session import Session
from kvd.errors import ErrorCode, refusal


def pool_tensor(client: Session) -> torch.Tensor:
    """The pool of an attached worker as int8 [nbytes], sharing its memory; what an earlier session left is zeroed.

    On a GPU it is that of the daemon, found by its UUID, whatever ordinal it has here.

    Raises:
        InternalError: torch made a copy.

    """
    if client.device:
        pool = client.device_pool
        tensor = torch.as_tensor(pool, device=torch.device("cuda", pool.ordinal)).view(torch.int8)
        if tensor.data_ptr() != pool.pointer:
            text = f"torch copied the pool at {pool.pointer:#x} of {client.device} to {tensor.data_ptr():#x}"
            raise refusal(ErrorCode.INTERNAL, text)
    else:
        tensor = torch.frombuffer(client.pool, dtype=torch.int8)
    return tensor.zero_() if client.kept else tensor
