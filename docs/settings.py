"""Writes settings.md beside this file from the configuration: `python docs/settings.py`."""

import typing
from enum import Enum
from pathlib import Path

from pydantic.fields import FieldInfo

from kvd.daemon.config import Config

_PAGE = Path(__file__).with_name("settings.md")
_HEAD = """# Settings

Each setting is a flag of `kvd serve` (`--claim-ttl 10`), an environment variable (`KVD_CLAIM_TTL=10`) and a key of the
TOML file that `--config` names (`claim_ttl = 10`). Flags win over the environment, the environment over the file. Times
are in seconds. This page is generated from `kvd/daemon/config.py` by `python docs/settings.py`.

| setting | default | what it does |
|---|---|---|
"""


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "from the host"
    if field.default in {None, ""}:
        return ""
    value = field.default.value if isinstance(field.default, Enum) else field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _choices(field: FieldInfo) -> str:
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = [str(member.value) for member in kind]
    elif typing.get_origin(kind) is typing.Literal:
        values = [str(value) for value in typing.get_args(kind)]
    else:
        return ""
    return " One of " + ", ".join(f"`{value}`" for value in values) + "."


def _text(field: FieldInfo) -> str:
    return (field.description or "").replace("|", r"\|") + _choices(field) + _range(field)


def _range(field: FieldInfo) -> str:
    bounds = [getattr(bound, end) for end in ("ge", "le") for bound in field.metadata if hasattr(bound, end)]
    return " From {:.10g} to {:.10g}.".format(*bounds) if bounds else ""


def page() -> str:
    """The page as it should be."""
    rows = (f"| `{name}` | {_default(field)} | {_text(field)} |\n" for name, field in Config.model_fields.items())
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    _PAGE.write_text(page(), encoding="utf-8")
