"""`kvd keys`."""

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
