"""The threads that close what other users' processes passed (`kvd.foreign`)."""

import gc
import threading

from kvd import foreign
from tests.support.patience import MOMENT


def threads() -> list[threading.Thread]:
    """Those that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name == foreign.NAME]


def wait_until_closed() -> None:
    """Until all that nobody uses any longer is closed and their threads have ended, or for a moment."""
    gc.collect()
    for thread in threads():
        thread.join(MOMENT)
