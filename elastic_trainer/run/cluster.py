"""Connecting to Ray: a local one of our own, or a cluster that is there."""

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication import authentication_token_setup
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError as RayAuthenticationError

from elastic_trainer.actors.handles import NAMESPACE
from elastic_trainer.actors.site import thread_limits
from elastic_trainer.config import Config
from elastic_trainer.errors import AuthenticationError, ClusterError
from elastic_trainer.run.own_ray import SETTINGS, environment, without_helpers

CONNECT_S = 5.0  # a host that does not accept a connection by then is not there
PACKAGE = Path(__file__).parents[1]
INSTALLED = frozenset({"site-packages", "dist-packages"})
AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_HINT = (
    "Use the cluster's token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to its file "
    "(default ~/.ray/auth_token), or RAY_AUTH_TOKEN."
)


def resolve_address(address: str | None) -> str:
    """`local`, `auto` or HOST:PORT; null means the cluster of RAY_ADDRESS, else local.

    RAY_ADDRESS is set inside `ray job submit`, so the same command works there and on a laptop.

    Raises:
        ClusterError: RAY_ADDRESS is one of Ray Client.
    """
    environment = os.environ.get("RAY_ADDRESS", "")
    if address in (None, "auto") and environment.startswith("ray://"):
        raise ClusterError(
            f"RAY_ADDRESS is {environment}, an address of Ray Client, through which the trainer "
            "does not run",
            "Set it, or --address, to HOST:PORT of the cluster's GCS, or use --address local.",
        )
    return address or ("auto" if environment else "local")


@contextlib.contextmanager
def connected(config: Config) -> Iterator[str]:
    """A connection to Ray for the length of the block; ends a Ray that it started.

    Yields:
        Address of the cluster, HOST:PORT.

    Raises:
        ClusterError: nothing answers at the address.
        AuthenticationError: the token is missing or wrong.
    """
    _quieten_ray()
    address = resolve_address(config.cluster.address)
    options = _options(config, address)
    if address == "local":
        _have_token()
    with _own_ray(config) if address == "local" else contextlib.nullcontext():
        context = _join(address, options)
    try:
        yield str(context.address_info["gcs_address"])
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _own_ray(config: Config) -> Iterator[None]:
    """Let a Ray of our own start lean, and its processes with all that the run's actors need."""
    limits = thread_limits(config.numerics.threads_per_stage)
    with environment({**limits, **_paths(config)}), without_helpers():
        yield


def connect_for_control(address: str) -> None:
    """Connect to a running run's cluster, to call its coordinator."""
    _quieten_ray()
    _join(address, _common_options(address))


def _join(address: str, options: Mapping[str, Any]) -> Any:
    """`ray.init`, with errors of ours; what can be told at once is not left to its long tries."""
    try:
        if ":" in address:
            _check_reachable(address)
            _check_token(address)
        return ray.init(**options)
    except RayAuthenticationError as error:
        raise _refused(address) from error
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _explained(address, error) from error


def module_folder(target: str | None) -> str | None:
    """Folder that must be on the workers' path to import a `module:function`; None: installed."""
    if target is None:
        return None
    top, *inner = target.partition(":")[0].split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:  # a package, with or without __init__.py
        place = _portion([Path(p) for p in spec.submodule_search_locations], inner)
    elif spec.has_location and spec.origin is not None:
        place = Path(spec.origin)
    else:
        return None  # built in
    return None if INSTALLED.intersection(place.parts) else str(place.parent)


def _portion(folders: Sequence[Path], inner: Sequence[str]) -> Path:
    """The folder, of those that a namespace package is made of, that holds the module."""
    for depth in range(len(inner), 0, -1):
        for folder in folders:
            module = folder.joinpath(*inner[:depth])
            if module.is_dir() or module.with_suffix(".py").is_file():
                return folder
    return folders[0]


def worker_environment(config: Config) -> dict[str, str]:
    """Environment variables that the run's actors do not find in their node's processes."""
    return {} if resolve_address(config.cluster.address) == "local" else _paths(config)


def _paths(config: Config) -> dict[str, str]:
    folders = [module_folder(config.model.target), module_folder(config.loss.target)]
    paths = [f for f in dict.fromkeys(folders) if f]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}


def _options(config: Config, address: str) -> dict[str, Any]:
    common = _common_options(address)
    if address == "local":
        # CPU workers of a local run may outnumber the cores: the user asked for them.
        cpus = max(os.cpu_count() or 1, config.cluster.num_workers + config.elastic.num_spares)
        return {
            **common,
            "num_cpus": cpus,
            "include_dashboard": False,
            "_system_config": dict(SETTINGS),  # Ray adds to the mapping that it gets
        }
    return {**common, "runtime_env": _shipped(config)}


def _common_options(address: str) -> dict[str, Any]:
    return {
        "address": address,
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "configure_logging": False,
        "logging_level": logging.ERROR,
    }


def _shipped(config: Config) -> dict[str, Any]:
    """What nodes need that they may not have: this package and the user's own modules."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    if "py_modules" in (job.get("runtime_env") or {}):
        return {}  # the job ships modules itself, and Ray does not merge two lists
    modules = [str(PACKAGE)]
    for target in (config.model.target, config.loss.target):
        folder = module_folder(target)
        if folder is not None and target is not None:
            name = target.partition(":")[0].partition(".")[0]
            package = Path(folder) / name
            modules.append(str(package if package.is_dir() else package.with_suffix(".py")))
    return {"py_modules": list(dict.fromkeys(modules)), "excludes": ["**/__pycache__"]}


def _quieten_ray() -> None:
    """Drop Ray's notice that a token is in use; its warning that none is stays. And drop its
    remarks on workers that die, which come in the midst of the display: the run tells of them."""
    ray._private.worker._worker_logs_enabled = False
    log = logging.getLogger("ray._private.authentication.authentication_token_setup")
    log.addFilter(_is_worth_showing)  # a second time changes nothing


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return "authentication is enabled" not in record.getMessage()


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ClusterError(f"{address!r} is not HOST:PORT", "Use local, auto or HOST:PORT.")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error}",
            "Check the address, or start one: `ray start --head`.",
        ) from error


def _check_token(address: str) -> None:
    """Ask the cluster for its id, without and with our token; Ray alone would try for 20 s, loudly,
    and then not say that it was the token.

    A Ray that `ray.init` has started wants the token in the user's home. Who joins it by its
    address has to be told so: Ray looks for a token by itself only where it finds the cluster, too.
    """
    if not _is_refused(address, {}):
        return  # it wants none, or whatever else is wrong: ray.init says it better
    tokens = AuthenticationTokenLoader.instance()
    found = tokens.has_token(ignore_auth_mode=True)
    headers = tokens.get_token_for_http_header(ignore_auth_mode=True) if found else {}
    if not headers or _is_refused(address, headers):
        raise _refused(address)
    if AUTH_MODE not in os.environ:
        authentication_token_setup._enable_token_auth()


def _is_refused(address: str, headers: Mapping[str, str]) -> bool:
    """Whether the cluster says that these headers have no right to ask."""
    import grpc  # type: ignore[import-untyped]
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        cluster = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            request = gcs_service_pb2.GetClusterIdRequest()  # type: ignore[attr-defined]
            cluster.GetClusterId(request, metadata=tuple(headers.items()), timeout=CONNECT_S)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def _have_token() -> None:
    """Make the token in the user's home that a Ray of our own will want, if there is none.

    Ray would do so, too. But of two programs that do it at once, the second overwrites what the
    first one's cluster goes by, and nobody can join that one any more.
    """
    if any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    file = Path.home() / ".ray" / "auth_token"
    if os.environ.get(AUTH_MODE, "token") != "token" or file.exists():
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".auth_token-") as made:
            made.write(secrets.token_hex(32))  # readable by this user only
            made.flush()
            with contextlib.suppress(FileExistsError):  # somebody else was faster: theirs it is
                os.link(made.name, file)
    except OSError as error:
        raise ClusterError(
            f"cannot write Ray's token to {file}: {error}",
            "Set RAY_AUTH_TOKEN_PATH to a file with a token of your own.",
        ) from error
    AuthenticationTokenLoader.instance().reset_cache()


def _refused(address: str) -> AuthenticationError:
    return AuthenticationError(
        f"the Ray cluster at {address} refused this program: its token is wrong or missing",
        TOKEN_HINT,
    )


def _explained(address: str, error: Exception) -> ClusterError:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    lowered = str(error).lower()
    if "token" in lowered or "unauthenticated" in lowered:
        return AuthenticationError(f"cannot join the Ray cluster at {address}: {text}", TOKEN_HINT)
    return ClusterError(
        f"cannot join the Ray cluster at {address}: {text}",
        "Check `ray status` there, or use --address local.",
    )


def add_working_folder() -> None:
    """Let `module:function` targets lie in the current folder, as with `python -m`."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
