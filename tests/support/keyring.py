"""Daemons that know each other by keys."""

from kvd.net import keys


class Keyring:
    """Makes each daemon's key and one list for all."""

    def __init__(self, fleet, folder):
        self._fleet, self._folder = fleet, folder
        self.allowed = folder / "peers"
        self.lines = {}

    def daemon(self, name, *, listed=True):
        pair, file = keys.generate(), self._folder / f"{name}.key"
        keys.save(pair, file)
        self.lines[name] = f"{pair.public.hex()} {name}\n"
        if listed:
            self.write(*self.lines)

        def start(**flags):
            return self._fleet.daemon(name, curve_key=str(file), curve_peers=str(self.allowed), **flags)

        return start

    def write(self, *entries):
        """Lines for these: a name, and pools that may be read after it."""
        split = [entry.partition(" ") for entry in entries]
        self.allowed.write_text("".join(f"{self.lines[name].strip()} {pools}\n" for name, _, pools in split))
        self.allowed.chmod(0o644)
