"""All that SGLang's server imports, with stand-ins for modules that are absent here: 18 seconds of a core."""

from tests.sglang.testbed.absent import stand_in

stand_in()

import sglang.srt.entrypoints.http_server  # noqa: E402, F401 - it needs the stand-ins
