"""The loop of `kvd`, for tests."""

import warnings

import uvloop


class UvLoop(uvloop.Loop):
    """Closes also when a test has failed and left connections open, and says which.

    uvloop warns of each before it closes it. Where warnings are errors, it would leave it open, and wait for it.
    """

    def close(self) -> None:
        """Closes the loop."""
        with warnings.catch_warnings(record=True) as unclosed:
            warnings.simplefilter("always")
            super().close()
        assert not unclosed, [str(each.message) for each in unclosed]
