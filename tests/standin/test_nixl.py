"""The real NIXL and UCX on device memory of the stand-in: registration, and reads between two processes."""

import os
import socket

import pytest

from tests.standin.calls import cu, do, memory, read, start, write
from tests.standin.children import succeed
from tests.standin.driver import work


@pytest.mark.parametrize("kind", ["vmm", "legacy"])
def test_nixl_reads_device_memory_of_another_process(standin, kind):
    def child(kind):
        ours, theirs = socket.socketpair()
        producer = os.fork() == 0
        link = theirs if producer else ours
        link.settimeout(30)

        from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - each process its own

        start()
        size, block = 4 << 20, 1 << 16
        address = memory(size).address if kind == "vmm" else int(do(cu.cuMemAlloc, size))
        agent = nixl_agent("P" if producer else "D", nixl_agent_config(backends=["UCX"]))
        agent.register_memory([(address, size, 0, "")], mem_type="VRAM")
        pattern = b"".join(bytes([number]) * block for number in range(size // block))
        if producer:
            write(address, pattern)
            link.sendall(address.to_bytes(8, "little") + agent.get_agent_metadata())
            link.recv(1)
            os._exit(0)
        message = link.recv(1 << 20)
        peer = agent.add_remote_agent(message[8:])
        there = int.from_bytes(message[:8], "little")
        blocks = range(0, size, block)
        wanted = agent.get_xfer_descs([(there + size - block - at, block, 0) for at in blocks], mem_type="VRAM")
        into = agent.get_xfer_descs([(address + at, block, 0) for at in blocks], mem_type="VRAM")
        transfer = agent.initialize_xfer("READ", into, wanted, peer)
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        assert state == "DONE"
        link.sendall(b"x")
        assert read(address, size) == b"".join(pattern[at : at + block] for at in reversed(blocks))
        os.waitpid(0, 0)
        # UCX copies what cuMemAlloc made straight from its maker, and the rest in pieces by way of the host.
        assert (work()["copies"] == len(blocks) + 1) == (kind == "legacy")

    # The first finds device memory where UCX's hooks, which need libcudart, are not loaded.
    succeed(standin, child, kind, UCX_MEMTYPE_CACHE="n", UCX_CUDA_IPC_ENABLE_GET_ZCOPY="on", UCX_TLS="self,sm,tcp,cuda")
