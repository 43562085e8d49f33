"""All that SGLang's server imports, with stand-ins for modules that are absent here: 18 seconds of a core."""

from tests.sglang.testbed.absent import stand_in

stand_in()

import sglang.srt.entrypoints.http_server  # noqa: E402 - it needs the stand-ins
import sglang.srt.managers.tp_worker  # noqa: E402
import sglang.srt.model_executor.model_runner  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401 - all models, by each scheduler
