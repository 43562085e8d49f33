import pytest
import torch

from kvd.engines.demo.model import Model, ModelConfig


@pytest.fixture(scope="session")
def model():
    torch.set_num_threads(1)
    return Model(ModelConfig(layers=3, hidden=128, intermediate=256))
