import pytest

from kvd.engines.demo.model import Model, ModelConfig


@pytest.fixture(scope="session")
def model():
    return Model(ModelConfig(layers=3, hidden=128, intermediate=256))
