"""The configuration of a daemon: flags over environment (`KVD_...`) over a TOML file over defaults."""

import os
import socket as sockets
from dataclasses import fields
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvd import files, limits
from kvd.actors.runtime.settings import Settings
from kvd.errors import ErrorCode, refusal
from kvd.host import boot_id, cores, interface_of, rdma_devices, rdma_ports, without_links
from kvd.memory.memfd import Backing
from kvd.protocol.address import DEFAULT_SOCKET, LAST_PORT, PEERS, SOCKET_PATH, is_everywhere, is_local, is_unix

_BRIEF = 0.01
"""Seconds: what is done more often would keep the loop from its work."""
_NAME_CHARACTERS = 64
_WEEK = 7 * 24 * 3600.0
"""Seconds: a pool, or a peer, that nobody needs for so long is not kept."""
_OPEN = (
    "lets whoever can reach it, on loopback every user of this host, read every pool; set curve_key and curve_peers "
    "(`kvd keys generate` makes a key), pass --insecure, or leave listen out: then peers are this user's daemons on "
    "this host"
)
_UNPROTECTED = (
    "is for peers on other hosts, which read pools through UCX. That has no keys: whoever reaches its port reads and "
    "writes all pools of this daemon. Say with unprotected_transport by which IP address of this host, on "
    "a network of hosts that you trust; or listen on a Unix socket or loopback only"
)
_OF_ACTORS = Settings(daemon="", incarnation=0)
"""Has the defaults of what the actors share with the configuration."""
_ONLY_TCP = "insecure applies to tcp:// only, and without `listen` peers use a Unix socket; set `listen`, too"


class Config(BaseSettings):
    """Everything that an operator can set; times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="KVD_", extra="forbid")

    config: Path | None = Field(None, description="TOML file with any of these fields.")
    name: str = Field(
        default_factory=lambda: f"kvd-{sockets.gethostname()}"[:_NAME_CHARACTERS],
        pattern=rf"^[A-Za-z0-9._-]{{1,{_NAME_CHARACTERS}}}$",
        description="The daemon's name in tickets, logs and status. Daemons that meet need different names.",
    )
    socket: Path = Field(
        Path(DEFAULT_SOCKET),
        description="Session socket for workers, a path without spaces, `#` and `..`; the request socket has the same "
        "path with `.zmq` appended.",
    )
    socket_mode: str = Field("0660", pattern=r"^0?[0-7]{3}$", description="File mode of both sockets, octal.")
    worker_policy: Path | None = Field(
        None, description="TOML file: which other users may attach, under which names, with what quota of bytes."
    )
    listen: str = Field(
        "",
        description="Where peers connect: tcp://host:port (port 0: a free one). Unset: the Unix socket "
        "`<socket>.peers`, for daemons of this host: this user's, or with keys any user's.",
    )
    advertise: str | None = Field(
        None,
        pattern=r"^tcp://",
        description="Address in tickets, if it is not the one listened on (a wildcard, NAT).",
    )
    peers: Path | None = Field(
        None,
        description="Peer file: a line `<name> <address>` for each daemon to connect to in advance; reread on change.",
    )
    peers_dns: str | None = Field(
        None,
        description="DNS name of such daemons: SRV as `_kvd._tcp.decode.example`, or A as `decode.example:7710`.",
    )
    dns_server: str | None = Field(
        None, pattern=r"^\S+:[0-9]+$", description="host:port of the DNS server, if it is not /etc/resolv.conf's."
    )
    curve_key: Path | None = Field(
        None,
        description="Key file of this daemon (`kvd keys generate`): peers need an allowed key; traffic is encrypted.",
    )
    curve_peers: Path | None = Field(
        None,
        description="Allow-list: a line `<public key> <name> [pool ...]` for each peer; read again on SIGHUP.",
    )
    insecure: bool = Field(
        False, description="Allow tcp:// without CURVE: whoever can reach the port may read every pool."
    )
    unprotected_transport: str = Field(
        "",
        pattern=r"^[0-9A-Fa-f.:]*$",
        description="IP address by whose interface peers on other hosts read, needed where `listen` is for them. "
        "Whoever reaches it reads and writes all pools of this daemon, with or without a key.",
    )
    transport_ports: str = Field(
        "9930-9961",
        pattern="^[0-9]{1,5}-[0-9]{1,5}$",
        description="TCP ports of that transport, two for each daemon of the host and two more for each restart within "
        "a minute: open them to hosts that you trust.",
    )
    http: str = Field(
        "127.0.0.1:0",
        pattern=r"^\S*:[0-9]+$",
        description="host:port of /metrics, /livez and /readyz; port 0: a free one.",
    )
    device: str = Field(
        "cpu",
        description="Where pools are: `cpu` (host memory) or `cuda:N`, of the GPUs that CUDA_VISIBLE_DEVICES leaves.",
    )
    memory: Backing = Field(
        Backing.AUTO, description="Pages of host pools; `auto` takes the first of the others that is available."
    )
    copy_threads: int = Field(
        default_factory=lambda: min(2, cores()),
        ge=1,
        le=16,
        description="Threads that copy within the host. By default two, or one if the daemon may use one core only.",
    )
    heartbeat: float = Field(
        _OF_ACTORS.heartbeat,
        ge=_BRIEF,
        le=60,
        description="Seconds between pings of a peer, which is lost after three without an answer.",
    )
    retry: float = Field(
        _OF_ACTORS.retry, ge=_BRIEF, le=60, description="Seconds before an unanswered request is resent."
    )
    claim_ttl: float = Field(
        _OF_ACTORS.claim_ttl,
        ge=_BRIEF,
        le=600,
        description="Seconds that a silent consumer keeps its claims. Raise it if daemons are paused.",
    )
    claim_wait: float = Field(
        _OF_ACTORS.claim_wait, ge=_BRIEF, le=600, description="Seconds that a claim waits for its offer to be made."
    )
    attach_wait: float = Field(
        _OF_ACTORS.attach_wait,
        ge=_BRIEF,
        le=600,
        description="Seconds a restarted worker waits for its predecessor's process to end, then for its transfers.",
    )
    pool_linger: float = Field(
        _OF_ACTORS.pool_linger,
        ge=_BRIEF,
        le=_WEEK,
        description="Seconds that a pool is kept after its worker's process has ended. Lower it if memory is short.",
    )
    peer_idle: float = Field(
        _OF_ACTORS.peer_idle, ge=_BRIEF, le=_WEEK, description="Seconds after which an unused peer is forgotten."
    )
    max_quarantined: int = Field(
        _OF_ACTORS.max_quarantined,
        ge=0,
        le=limits.MAX_WORKERS * limits.MAX_REQUESTS_PER_WORKER,
        description="The daemon is not ready while more pulls than this are in quarantine.",
    )
    drain_grace: float = Field(
        30.0, ge=0, le=3600, description="Seconds that running transfers may take after SIGTERM."
    )
    traces: bool = Field(
        False, description="Export OpenTelemetry traces (extra `otel`), as the SDK's `OTEL_...` variables say."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="`auto`: readable on a terminal, JSON elsewhere."
    )

    @field_validator("config", mode="before")
    @classmethod
    def _check_config(cls, value: object) -> object:
        if value == "":
            raise ValueError("must be a path, or leave it out")
        return value

    @field_validator("socket")
    @classmethod
    def _check_socket(cls, value: Path) -> Path:
        try:
            path = str(value.absolute())
        except OSError as error:
            raise ValueError(f"is relative to a folder that is gone ({error.strerror}): name the whole path") from error
        if SOCKET_PATH.fullmatch(path) is None or os.path.normpath(path) != path:
            raise ValueError("must be a path in UTF-8 without spaces, # and ..")
        return value

    @field_validator("http", "dns_server")
    @classmethod
    def _check_port(cls, value: str | None) -> str | None:
        if value is not None and int(value.rpartition(":")[2]) > LAST_PORT:
            raise ValueError(f"a port is at most {LAST_PORT}")
        return value

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.retry >= self.claim_ttl:
            raise ValueError(f"retry ({self.retry} s) must be below claim_ttl ({self.claim_ttl} s)")
        return self

    @model_validator(mode="after")
    def _listen_beside_the_socket(self) -> Self:
        self.listen = without_links(self.listen or f"ipc://{self.socket.absolute()}{PEERS}")
        return self

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if (self.curve_key is None) != (self.curve_peers is None):
            raise ValueError("curve_key and curve_peers need each other: the own key, and the keys of allowed peers")
        if self.curve_key is not None and self.insecure:
            raise ValueError("curve_key and insecure contradict each other; drop one")
        if self.curve_key is None and is_unix(self.listen) == self.insecure:
            raise ValueError(_ONLY_TCP if self.insecure else f"listen ({self.listen}) {_OPEN}")
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if self.advertise is None:
            return self
        if is_unix(self.listen):
            raise ValueError(f"advertise ({self.advertise}) needs a tcp:// address to stand for; set `listen`")
        if is_everywhere(self.advertise) or (is_local(self.advertise) and not is_local(self.listen)):
            raise ValueError(
                f"advertise ({self.advertise}) goes into tickets, and on another host it means that host itself; "
                f"set it to an address at which other hosts reach listen ({self.listen})"
            )
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if is_local(self.listen):
            if self.unprotected_transport:
                text = f"unprotected_transport ({self.unprotected_transport}) is for peers on other hosts, and listen"
                raise ValueError(f"{text} ({self.listen}) is reached from this one only; leave one of them out")
            return self
        if not self.unprotected_transport:
            raise ValueError(f"listen ({self.listen}) {_UNPROTECTED}")
        first, last = map(int, self.transport_ports.split("-"))
        if not 0 < first < last < 1 << 16:
            raise ValueError(f"transport_ports ({self.transport_ports}) are no two or more ports in ascending order")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags arrive as init settings; the file that they or the environment name comes last."""
        path = init_settings().get("config") or env_settings().get("config")
        file = _read_file(settings_cls, Path(path)) if path else None
        return (init_settings, env_settings, *([file] if file else []))

    def network_devices(self) -> list[str]:
        """UCX names of the devices that the network's transport uses: an interface, and every port of an RDMA device.

        Raises:
            BadRequest: `BAD_CONFIG`, no interface of this host has the address.

        """
        interface = interface_of(self.unprotected_transport)
        if interface is None:
            text = f"unprotected_transport: no interface of this host has the address {self.unprotected_transport!r}"
            raise refusal(ErrorCode.BAD_CONFIG, f"{text}; `ip address` lists them")
        return [interface, *rdma_ports()]

    def actor_settings(self, incarnation: int) -> Settings:
        """The settings that the actors share with the configuration."""
        return Settings(
            daemon=self.name,
            incarnation=incarnation,
            host=boot_id(),
            rdma=bool(rdma_devices()),
            **{
                field.name: getattr(self, field.name) for field in fields(Settings) if field.name in Config.model_fields
            },
        )


def _read_file(settings_cls: type[BaseSettings], path: Path) -> InitSettingsSource:
    text, status = files.read(path, limits.MAX_CONFIG_BYTES)
    files.check_writers(path, status, "let anybody in")
    return InitSettingsSource(settings_cls, files.parse_toml(path, text))


def load(flags: dict[str, str]) -> Config:
    """The configuration from `flags`, the environment and the file.

    Raises:
        BadRequest: `BAD_CONFIG`, naming every wrong field, its value and what it may be; or the file cannot be read, or
            others than this user and root own it or may write to it.

    """
    try:
        return Config(**flags)  # type: ignore[arg-type]  # pydantic reads strings
    except ValidationError as error:
        text = "; ".join(_explain(item) for item in error.errors())
        raise refusal(ErrorCode.BAD_CONFIG, text) from error


def _explain(item: ErrorDetails) -> str:
    field = ".".join(map(str, item["loc"]))
    if not field:  # a rule about several fields: its text names them
        return item["msg"].removeprefix("Value error, ")
    return f"{field}: {item['msg']}, not {item['input']!r}"
