"""Where the configuration comes from, and what it says when it is wrong."""

import pytest

from kvd.cli.main import main
from kvd.config import Config, load
from kvd.errors import BadRequest


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path, monkeypatch):
    file = tmp_path / "kvd.toml"
    file.write_text('name = "from-file"\nheartbeat = 2.0\nclaim_ttl = 9.0\n')
    monkeypatch.setenv("KVD_HEARTBEAT", "3.0")
    monkeypatch.setenv("KVD_NAME", "from-environment")
    config = load({"config": str(file), "name": "from-flag"})
    assert (config.name, config.heartbeat, config.claim_ttl) == ("from-flag", 3.0, 9.0)


def test_the_environment_may_name_the_file(tmp_path, monkeypatch):
    file = tmp_path / "kvd.toml"
    file.write_text('name = "from-file"\n')
    monkeypatch.setenv("KVD_CONFIG", str(file))
    assert load({}).name == "from-file"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"heartbeat": "0"}, r"heartbeat: .*greater than 0.*not '0'"),
        ({"memory": "gold"}, r"memory: .*'hugetlb'.*not 'gold'"),
        ({"name": "a b"}, r"name: .*pattern.*not 'a b'"),
        ({"retry": "5", "claim_ttl": "5"}, r"retry \(5.0 s\) must be below claim_ttl"),
        ({"config": "/nowhere.toml"}, r"no file '/nowhere.toml'"),
        ({"colour": "red"}, r"colour: .*"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_may_be(flags, text):
    with pytest.raises(BadRequest, match=text) as raised:
        load(flags)
    assert raised.value.code == "bad_config"


def test_an_unknown_key_in_the_file_is_refused(tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text("colour = 1\n")
    with pytest.raises(BadRequest, match="colour"):
        load({"config": str(file)})


def test_every_field_is_documented():
    assert all(field.description for field in Config.model_fields.values())


def test_a_cuda_device_is_refused_with_what_to_do(tmp_path, capsys):
    flags = ["--name", "a", "--socket", str(tmp_path / "a.sock"), "--device", "cuda:0"]
    assert main(["serve", *flags]) == 2
    assert "no CUDA device: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_flag_ends_the_command_with_its_reason(capsys):
    assert main(["serve", "--heartbeat", "-1"]) == 2
    assert "heartbeat" in capsys.readouterr().err
