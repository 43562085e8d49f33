from tests.standin.calls import MIB, cu, do, memory, read, start, write
from tests.standin.children import succeed
from tests.standin.driver import live


def test_fresh_memory_is_not_zero_and_keeps_what_is_written(standin):
    def child():
        start()
        mine = memory(4 * MIB)
        assert read(mine.address, 4 * MIB) == b"\xa5" * (4 * MIB)
        write(mine.address + 5, b"hello")
        assert read(mine.address + 4, 7) == b"\xa5hello\xa5"

    succeed(standin, child)


def test_nothing_is_left_after_all_was_given_back(standin):
    def child():
        device = start()
        mine = memory()
        stream, event = do(cu.cuStreamCreate, 0), do(cu.cuEventCreate, 0)
        held = live()
        assert held.pop("registrations") == 0
        assert set(held.values()) == {1}
        mine.close()
        do(cu.cuStreamDestroy, stream)
        do(cu.cuEventDestroy, event)
        do(cu.cuDevicePrimaryCtxRelease, device)
        assert set(live().values()) == {0}

    assert succeed(standin, child) == ""
