"""The models of the laboratory, by name, and prompts for them. `models` writes them."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Final

VOCABULARY: Final = 512
WINDOW: Final = 64
"""Sliding window of the hybrid model, in tokens."""

BLOCK: Final = 32
"""Tokens a block: the least that vLLM's CPU kernels take. With latent attention they take 16, and nothing else."""

MODELS: Final = ("llama", "gemma", "llama4", "deepseek", "qwen-next", "granite", "bench", "eagle")

FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "deepseek": ("--block-size", "16", "--max-num-seqs", "1", "--attention-backend", "CPU_MLA"),
    "qwen-next": ("--dtype", "bfloat16"),
    "granite": ("--no-enable-prefix-caching",),
}
"""What a server needs beside the flags that all have. AMX_MLA, which a CPU with AMX gets, takes no float32. With a
prefix cache of Mamba2's states vLLM's CPU kernels fail at the first prompt of several blocks."""


GROUPS: Final = {"gemma": 6, "llama4": 4}
"""KV-cache groups, where there are several: a request takes blocks for each of them."""

STATE_TOKENS: Final = {"qwen-next": 288, "granite": 64}
"""Models with recurrent states, and the tokens of their blocks: vLLM makes those of attention as large as a state."""

UNCACHED: Final = frozenset({"deepseek", "granite"})
"""Models of which vLLM keeps no prefix cache here."""

LATENT: Final = frozenset({"deepseek"})
"""Models with latent attention. vLLM's CPU kernels for it round: on one server, without any connector, prefill and
decode disagree on log-probabilities, and so do batches with and without other requests, by up to 0.3 with the weights
here: as much as wrong KV makes. One request at a time gives equal ones.
"""


def write_models(folder: Path, *names: str, interpreter: str = sys.executable) -> None:
    """Writes models into `folder`/name, in a process of its own: transformers and torch are heavy.

    Raises:
        subprocess.CalledProcessError: It failed; what it said is on standard error.

    """
    command = [interpreter, "-m", "tests.vllm.testbed.models", str(folder), *names]
    environment = os.environ | OFFLINE | {"TQDM_DISABLE": "1"}
    subprocess.run(command, check=True, env=environment, timeout=300)  # the command is ours


OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def make_prompt(tokens: int, seed: int) -> list[int]:
    """A prompt of `tokens` random token ids; equal seeds give prompts of which one begins the other."""
    source = random.Random(seed)  # noqa: S311  # no secret
    return [source.randrange(2, VOCABULARY) for _ in range(tokens)]
