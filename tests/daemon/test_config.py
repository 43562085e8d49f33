"""Where the configuration comes from, and what it says when it is wrong."""

import os

import pytest
import structlog

from kvd.cli.main import main
from kvd.daemon.config import Config, load
from kvd.errors import BadRequest, ErrorCode

NETWORK = {"listen": "tcp://10.0.0.7:1", "insecure": "true", "unprotected_transport": "10.0.0.7"}


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
        ({"heartbeat": "0"}, r"heartbeat: .*greater than or equal to 0.01.*not '0'"),
        ({"memory": "gold"}, r"memory: .*'hugetlb'.*not 'gold'"),
        ({"name": "a b"}, r"name: .*pattern.*not 'a b'"),
        ({"retry": "5", "claim_ttl": "5"}, r"retry \(5.0 s\) must be below claim_ttl"),
        ({"config": "/nowhere.toml"}, r"cannot read /nowhere.toml: No such file"),
        ({"config": "/dev/null"}, r"/dev/null is no regular file"),
        ({"config": ""}, r"config: .*a path, or leave it out, not ''"),
        ({"colour": "red"}, r"colour: .*"),
        (
            {"listen": "tcp://0.0.0.0:7071"},
            r"listen \(tcp://0.0.0.0:7071\) lets whoever can reach it.* pass --insecure",
        ),
        ({"listen": "tcp://127.0.0.1:0"}, r"on loopback every user of this host.* or leave listen out"),
        ({"insecure": "true"}, r"insecure applies to tcp:// only.*; set `listen`, too"),
        ({"advertise": "tcp://10.0.0.7:1"}, r"needs a tcp:// address to stand for; set `listen`"),
        ({"listen": "tcp://gpu-7:7071"}, r"set curve_key and curve_peers"),
        (
            {"listen": "tcp://[::1]:1", "advertise": "tcp://0.0.0.0:7071", "insecure": "true"},
            r"advertise \(tcp://0.0.0.0:7071\) goes into tickets",
        ),
        (
            {"listen": "tcp://10.0.0.7:1", "advertise": "tcp://127.0.0.1:1", "insecure": "true"},
            r"on another host it means that host itself; set it to an address",
        ),
        (
            {"listen": "tcp://gpu-7:7071", "curve_key": "/k", "curve_peers": "/p"},
            r"has no keys: whoever reaches its port reads and writes all pools of this daemon. "
            r"Say with unprotected_transport",
        ),
        ({"unprotected_transport": "10.0.0.7"}, r"and listen \(ipc:.*\) is reached from this one only"),
        (
            {"listen": "tcp://10.0.0.7:1", "insecure": "true", "unprotected_transport": "eth0"},
            r"unprotected_transport: .*pattern.*not 'eth0'",
        ),
        (
            {**NETWORK, "transport_ports": "9961-9930"},
            r"transport_ports \(9961-9930\) are no two or more ports in ascending order",
        ),
        ({**NETWORK, "transport_ports": "9930-99300"}, r"transport_ports \(9930-99300\) are no two"),
        *(
            ({"socket": path}, r"socket: .*must be a path in UTF-8 without spaces, # and \.\.")
            for path in ("/run/a b.sock", "/run/a#b.sock", "/run/../b.sock", "/run/\udcff.sock", "a\0b")
        ),
        ({"curve_key": "/k"}, r"curve_key and curve_peers need each other"),
        ({"curve_key": "/k", "curve_peers": "/p", "insecure": "true"}, r"contradict each other"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_may_be(flags, text):
    with pytest.raises(BadRequest, match=text) as raised:
        load(flags)
    assert raised.value.code == "bad_config"


@pytest.mark.parametrize(
    "flags",
    [
        {"listen": "ipc:///run/kvd/decode.peers"},
        {"listen": "tcp://127.0.0.2:7071", "insecure": "true"},
        {"listen": "tcp://0.0.0.0:7071", "insecure": "true", "unprotected_transport": "10.0.0.7"},
        {"listen": "tcp://gpu-7:7071", "curve_key": "/k", "curve_peers": "/p", "unprotected_transport": "fd00::7"},
    ],
)
def test_a_unix_socket_curve_or_an_explicit_word_is_enough_to_listen(flags):
    assert load(flags).listen == flags["listen"]


def test_an_address_that_this_host_does_not_have_opens_no_transport():
    with pytest.raises(BadRequest, match=r"no interface of this host has the address '192\.0\.2\.77'; `ip address`"):
        load({**NETWORK, "unprotected_transport": "192.0.2.77"}).network_devices()


def test_peers_connect_to_a_unix_socket_beside_that_of_the_workers_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load({"socket": "d.sock"}).listen == f"ipc://{tmp_path}/d.sock.peers"


@pytest.mark.parametrize("flags", [{"socket": "{}/var/run/d.sock"}, {"listen": "ipc://{}/var/run/d.sock.peers"}])
def test_peers_are_told_a_path_without_links(tmp_path, flags):
    for folder in ("var", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "var/run").symlink_to("../run")
    named = {name: value.format(tmp_path) for name, value in flags.items()}
    assert load(named).listen == f"ipc://{tmp_path}/run/d.sock.peers"


def test_a_key_file_that_cannot_be_used_ends_serve_with_the_fix(tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("")
    key.chmod(0o644)
    flags = ["--socket", str(tmp_path / "a.sock"), "--curve-key", str(key), "--curve-peers", str(key)]
    assert main(["serve", *flags]) == 2
    assert f"run `chmod 600 {key}`" in capsys.readouterr().err


def test_an_unknown_key_in_the_file_is_refused(tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text("colour = 1\n")
    with pytest.raises(BadRequest, match="colour"):
        load({"config": str(file)})


def test_every_field_is_documented():
    assert all(field.description for field in Config.model_fields.values())


@pytest.fixture
def own_log():
    """The command sets the log up for its process, which here runs other tests after it."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("own_log")
def test_a_gpu_that_cannot_be_had_is_refused_with_what_to_do(tmp_path, capsys):
    flags = ["--name", "a", "--socket", str(tmp_path / "a.sock"), "--device", "cuda:99"]
    assert main(["serve", *flags]) == 2
    assert "no pools on 'cuda:99'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_flag_ends_the_command_with_its_reason(capsys):
    assert main(["serve", "--heartbeat", "-1"]) == 2
    assert "heartbeat" in capsys.readouterr().err


def test_a_configuration_that_others_could_have_written_is_refused(tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text('name = "d"\n')
    file.chmod(0o664)
    with pytest.raises(BadRequest, match=f"chmod go-w {file}") as caught:
        load({"config": str(file)})
    assert caught.value.code is ErrorCode.BAD_CONFIG


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_configuration_of_another_user_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "kvd.toml"
    file.write_text('name = "d"\n')
    os.chown(file, 12345, -1)
    monkeypatch.setenv("KVD_CONFIG", str(file))
    with pytest.raises(BadRequest, match="belongs to user 12345, who could let anybody in; run `chown 0 "):
        load({})


def test_a_configuration_that_the_environment_names_must_be_there_and_be_toml(tmp_path, monkeypatch):
    file = tmp_path / "kvd.toml"
    monkeypatch.setenv("KVD_CONFIG", str(file))
    with pytest.raises(BadRequest, match=f"cannot read {file}: No such file"):
        load({})
    file.write_text("name = \n")
    with pytest.raises(BadRequest, match=f"{file}: Invalid value"):
        load({})


NUMBERS = [name for name, field in Config.model_fields.items() if field.annotation in (int, float)]


def bounds_of(name):
    metadata = Config.model_fields[name].metadata
    return [next(getattr(bound, end) for bound in metadata if hasattr(bound, end)) for end in ("ge", "le")]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range_and_an_error_that_names_it(name):
    least, most = bounds_of(name)
    for wrong in ("nan", "inf", "-inf", "1e18", str(most + 1), str(least - 1)):
        with pytest.raises(BadRequest) as caught:
            load({name: wrong})
        assert caught.value.code is ErrorCode.BAD_CONFIG
        assert f"{name}: " in caught.value.text
        assert repr(wrong) in caught.value.text


@pytest.mark.parametrize(("name", "value"), [("http", "127.0.0.1:65536"), ("dns_server", "10.0.0.1:99999")])
def test_so_have_ports(name, value):
    with pytest.raises(BadRequest, match=f"{name}: .*a port is at most 65535, not '{value}'"):
        load({name: value})


def test_a_relative_socket_needs_a_folder_to_start_from(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BadRequest, match=r"socket: .*is relative to a folder that is gone \(No such file.*'d\.sock'"):
        load({"socket": "d.sock"})


def test_the_longest_host_name_gives_a_name_that_may_be_had(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 64)
    name = load({}).name
    assert load({"name": name}).name == name


def test_toml_that_cannot_be_parsed_is_refused(tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text("drain_grace = " + "1" * 5_000)
    with pytest.raises(BadRequest, match=f"{file}: Exceeds the limit"):
        load({"config": str(file)})
