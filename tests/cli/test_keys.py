"""`kvd keys`."""

import pytest

from kvd.cli.main import main
from kvd.net import keys


def test_what_generate_prints_is_a_line_of_an_allow_list_and_show_prints_it_again(tmp_path, capsys):
    file, allowed = tmp_path / "key", tmp_path / "allowed"
    assert main(["keys", "generate", str(file), "--name", "host-a"]) == 0
    line = capsys.readouterr().out
    assert main(["keys", "show", str(file), "--name", "host-a"]) == 0
    assert capsys.readouterr().out == line
    allowed.write_text(line)
    allowed.chmod(0o644)
    assert keys.load_allowed(allowed) == {keys.load(file).public: keys.Allowed("host-a")}


def test_generate_does_not_overwrite(tmp_path, capsys):
    file = tmp_path / "key"
    assert main(["keys", "generate", str(file), "--name", "a"]) == 0
    assert main(["keys", "generate", str(file), "--name", "a"]) == 2
    assert "would shut out every peer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["host 1", "a\nb", "", "a/b", "a" * 65, "*", "a*b"])
def test_a_name_that_an_allow_list_cannot_have_is_refused_before_anything_is_written(tmp_path, capsys, name):
    assert main(["keys", "generate", str(tmp_path / "key"), "--name", name]) == 2
    assert f"the name {name!r} must be 1 to 64 letters" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["keys", "generate", str(tmp_path / "key"), "--name", "vllm-*"]) == 0
    assert main(["keys", "show", str(tmp_path / "key"), "--name", name]) == 2
