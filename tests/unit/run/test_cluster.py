"""Which Ray is joined, what is shipped to it, and what each worker asks of it; without Ray."""

import json
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication_test_utils import reset_auth_token_state
from ray._raylet import (  # type: ignore[attr-defined]
    AuthenticationMode,
    AuthenticationTokenLoader,
    get_authentication_mode,
)
from ray.exceptions import AuthenticationError as RayAuthenticationError

import elastic_trainer
from elastic_trainer.actors import site
from elastic_trainer.actors.resources import Node, bundles, capacity, next_bundle, no_room
from elastic_trainer.config import ClusterConfig, Config, LossConfig, ModelConfig
from elastic_trainer.errors import AuthenticationError, ClusterError
from elastic_trainer.run import cluster

AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
PACKAGE = str(Path(elastic_trainer.__file__).parent)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No trace of a cluster, nor of a token for one."""
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "PYTHONPATH", *AUTH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    reset_auth_token_state()
    yield
    for name in AUTH:  # what was enabled on the way
        os.environ.pop(name, None)
    monkeypatch.undo()
    reset_auth_token_state()


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"CPU": 8.0}, [{"CPU": 1.0}] * 3),
        ({"CPU": 8.0, "GPU": 4.0}, [{"GPU": 1.0}] * 3),
        ({"CPU": 8.0, "GPU": 3.0}, [{"GPU": 1.0}] * 3),
        ({"CPU": 8.0, "GPU": 1.0}, [{"GPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}]),
        ({}, [{"CPU": 1.0}] * 3),
    ],
)
def test_a_gpu_each_where_there_are(
    resources: Mapping[str, float], expected: list[dict[str, float]]
) -> None:
    assert bundles(ClusterConfig(num_workers=3), resources) == expected


def test_what_is_configured_wins() -> None:
    asked = {"CPU": 2.0, "fast_disk": 0.5}
    config = ClusterConfig(num_workers=2, resources_per_worker=asked)
    made = bundles(config, {"GPU": 8.0})
    assert made == [asked, asked]
    made[0]["CPU"] = 9.0
    assert config.resources_per_worker["CPU"] == 2.0 == made[1]["CPU"], "each has its own"


def test_accelerator_type() -> None:
    config = ClusterConfig(num_workers=2, accelerator_type="A100")
    assert bundles(config, {"GPU": 2.0}) == [{"GPU": 1.0, "accelerator_type:A100": 0.001}] * 2
    both = ClusterConfig(
        num_workers=1, accelerator_type="T4", resources_per_worker={"GPU": 0.5, "CPU": 1}
    )
    assert bundles(both, {}) == [{"GPU": 0.5, "CPU": 1, "accelerator_type:T4": 0.001}]
    assert bundles(config, {"GPU": 1.0}) == [
        {"GPU": 1.0, "accelerator_type:A100": 0.001},
        {"CPU": 1.0},  # a node without GPUs has none of that type
    ]
    with pytest.raises(ClusterError, match="accelerator_type is A100, but no worker gets a GPU"):
        bundles(config, {"CPU": 8.0})


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, None, "local"),
        (None, "10.0.0.1:6379", "auto"),
        ("local", "10.0.0.1:6379", "local"),
        ("auto", None, "auto"),
        ("host:1", "10.0.0.1:6379", "host:1"),
    ],
)
def test_which_cluster(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environment: str | None, expected: str
) -> None:
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert cluster.resolve_address(given) == expected


class FakeRay:
    """Stands in for `ray.init` and `ray.shutdown`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.options: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.num_shutdowns = 0
        self.address_info = {"gcs_address": "1.2.3.4:5"}

    def init(self, **options: Any) -> "FakeRay":
        self.options = options
        self.environment = dict(os.environ)
        if self.error is not None:
            raise self.error
        return self

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray, "init", fake.init)
    monkeypatch.setattr(ray, "shutdown", fake.shutdown)
    return fake


def config(address: str | None = None, num_workers: int = 2, **parts: Any) -> Config:
    return Config(cluster=ClusterConfig(address=address, num_workers=num_workers), **parts)


def test_a_local_ray_has_a_cpu_per_worker_and_no_dashboard(fake_ray: FakeRay) -> None:
    with cluster.connected(config(num_workers=1000)) as address:
        assert address == "1.2.3.4:5"
        assert fake_ray.num_shutdowns == 0
    assert fake_ray.num_shutdowns == 1
    assert fake_ray.options["address"] == "local"
    assert fake_ray.options["num_cpus"] == 1000
    assert fake_ray.options["include_dashboard"] is False
    assert "runtime_env" not in fake_ray.options, "its workers have what this process has"
    with cluster.connected(config(num_workers=1)):
        assert fake_ray.options["num_cpus"] == os.cpu_count()


def test_the_connection_ends_with_the_block(fake_ray: FakeRay) -> None:
    with pytest.raises(KeyError), cluster.connected(config()):
        raise KeyError
    assert fake_ray.num_shutdowns == 1


@pytest.mark.usefixtures("fake_ray")
@pytest.mark.parametrize("connect", ["train", "control"])
def test_nothing_answers(connect: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ClusterError, match=f"no Ray cluster answers at {address}.*ray start"):
        if connect == "control":
            cluster.connect_for_control(address)
        else:
            with cluster.connected(config(address)):
                pytest.fail("connected to nothing")


@pytest.mark.parametrize(
    ("error", "kind", "parts"),
    [
        (ConnectionError("\n\nno GCS\nmore"), ClusterError, ["auto: no GCS", "--address local"]),
        (RuntimeError("Invalid token"), AuthenticationError, ["RAY_AUTH_TOKEN_PATH"]),
        (RuntimeError("x: Unauthenticated"), AuthenticationError, ["RAY_AUTH_MODE=token"]),
        (
            RayAuthenticationError("bad"),
            AuthenticationError,
            ["auto refused this program", "RAY_AUTH_TOKEN_PATH"],
        ),
        (TimeoutError(), ClusterError, ["TimeoutError"]),
        (ValueError("odd"), ClusterError, ["odd"]),
    ],
)
def test_why_a_cluster_cannot_be_joined(
    fake_ray: FakeRay, error: Exception, kind: type[ClusterError], parts: list[str]
) -> None:
    fake_ray.error = error
    with pytest.raises(ClusterError) as caught, cluster.connected(config("auto")):
        pytest.fail("connected")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts)


TOKEN = "5eed" * 16


@pytest.fixture
def gcs() -> Iterator[Callable[[str | None], str]]:
    """Starts what answers as the head of a cluster with this token does; gives its address."""
    import grpc  # type: ignore[import-untyped]
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    servers = []

    def start(token: str | None) -> str:
        class Gcs(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
            def GetClusterId(self, request: Any, context: Any) -> Any:
                shown = dict(context.invocation_metadata()).get("authorization")
                if token is not None and shown != f"Bearer {token}":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                return gcs_service_pb2.GetClusterIdReply()  # type: ignore[attr-defined]

        server = grpc.server(ThreadPoolExecutor(1))
        servers.append(server)
        gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(Gcs(), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def token_at_home(tmp_path: Path, token: str) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(token)
    reset_auth_token_state()


def test_the_token_at_home_is_used_where_one_is_wanted(
    fake_ray: FakeRay, gcs: Callable[[str | None], str], tmp_path: Path
) -> None:
    """As by a Ray that `ray.init` has started: it wants a token, whatever the environment says."""
    token_at_home(tmp_path, TOKEN)
    cluster.connect_for_control(gcs(None))
    assert "RAY_AUTH_MODE" not in os.environ, "nobody wants one"
    cluster.connect_for_control(gcs(TOKEN))
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert get_authentication_mode() == AuthenticationMode.TOKEN, "of this process, too"


@pytest.mark.parametrize("token", [None, "0bad" * 16])
def test_a_token_that_is_missing_or_wrong(
    fake_ray: FakeRay, gcs: Callable[[str | None], str], tmp_path: Path, token: str | None
) -> None:
    if token is not None:
        token_at_home(tmp_path, token)
    with pytest.raises(AuthenticationError, match="its token is wrong or missing"):
        cluster.connect_for_control(gcs(TOKEN))
    assert not fake_ray.options and "RAY_AUTH_MODE" not in os.environ


def test_a_local_rays_token_is_made_once(fake_ray: FakeRay, tmp_path: Path) -> None:
    """Two runs that start at once must not overwrite each other's."""
    file = tmp_path / ".ray" / "auth_token"
    with cluster.connected(config()):
        made = file.read_text()
        assert len(made) == 64 and file.stat().st_mode & 0o777 == 0o600
        assert AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    with cluster.connected(config()):
        assert file.read_text() == made and list(file.parent.iterdir()) == [file]


def test_of_two_that_make_a_token_the_first_wins(
    fake_ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def random(count: int) -> str:
        (tmp_path / ".ray" / "auth_token").write_text(TOKEN)  # the other one is faster
        return "0bad" * (count // 2)

    monkeypatch.setattr(secrets, "token_hex", random)
    with cluster.connected(config()):
        assert (tmp_path / ".ray" / "auth_token").read_text() == TOKEN


def test_a_users_own_token_is_left_alone(
    fake_ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with cluster.connected(config()):
        assert not (tmp_path / ".ray").exists()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with cluster.connected(config()):
        assert not (tmp_path / ".ray").exists()


def test_no_place_for_a_token(fake_ray: FakeRay, tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("a file")
    with pytest.raises(ClusterError, match="cannot write Ray's token.*RAY_AUTH_TOKEN_PATH"):
        with cluster.connected(config()):
            pytest.fail("connected")


def test_a_cluster_is_sent_the_package(fake_ray: FakeRay) -> None:
    with cluster.connected(config("auto")):
        pass
    assert fake_ray.options["runtime_env"]["py_modules"] == [PACKAGE]
    assert "num_cpus" not in fake_ray.options


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module and a package of a user's, importable."""
    (tmp_path / "lone_model.py").write_text("def make(): ...\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "losses.py").write_text("def loss(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_cluster_is_sent_the_users_modules(fake_ray: FakeRay, modules: Path) -> None:
    model, loss = (
        ModelConfig(target="lone_model:make"),
        LossConfig(target="own_package.losses:loss"),
    )
    with cluster.connected(config("auto", model=model, loss=loss)):
        pass
    shipped = fake_ray.options["runtime_env"]["py_modules"]
    assert shipped == [PACKAGE, str(modules / "lone_model.py"), str(modules / "own_package")]
    assert all(Path(path).exists() for path in shipped)


def test_a_job_that_ships_modules_itself_is_left_alone(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"runtime_env": {"py_modules": ["gcs://x.zip"]}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    with cluster.connected(config("auto")):
        pass
    assert fake_ray.options["runtime_env"] == {}


def test_where_workers_find_the_users_modules(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = config("auto", model=ModelConfig(target="lone_model:make"))
    assert cluster.worker_environment(own) == {"PYTHONPATH": str(modules)}
    both = config(
        "auto",
        model=ModelConfig(target="lone_model:make"),
        loss=LossConfig(target="own_package.losses:loss"),
    )
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    expected = os.pathsep.join([str(modules), "/somewhere"])
    assert cluster.worker_environment(both) == {"PYTHONPATH": expected}


def test_processes_of_our_own_ray_have_all_from_their_start(
    fake_ray: FakeRay, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    own = config("local", model=ModelConfig(target="lone_model:make"))
    with cluster.connected(own):
        assert os.environ["PYTHONPATH"] == "/somewhere" and os.environ["OMP_NUM_THREADS"] == "5"
    assert fake_ray.environment["PYTHONPATH"] == os.pathsep.join([str(modules), "/somewhere"])
    assert fake_ray.environment["OMP_NUM_THREADS"] == "1"
    assert cluster.worker_environment(own) == {}, "an actor that asks for more waits longer"


def test_installed_modules_need_no_path() -> None:
    assert cluster.module_folder("torch.nn:Linear") is None
    assert cluster.module_folder("nowhere_at_all:f") is None
    assert cluster.module_folder(None) is None
    assert cluster.worker_environment(config()) == {}


def test_targets_may_lie_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    cluster.add_working_folder()
    cluster.add_working_folder()
    assert sys.path == [str(tmp_path), "/elsewhere"]


def node(number: int = 0, **total: float) -> Node:
    return Node(node_id=f"n{number}", ip="10.0.0.1", name="host", total=total)


def test_no_room() -> None:
    wanted = bundles(ClusterConfig(num_workers=3, resources_per_worker={"CPU": 2.0}), {})
    text = no_room(wanted, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.5}, 0.0)
    assert "no room for 3 workers after 0 s" in text
    assert "asked for CPU 6; there is CPU 1.5 free of 4" in text and "\n" not in text


def test_no_room_for_a_kind_that_is_not_there() -> None:
    wanted = bundles(ClusterConfig(num_workers=1, accelerator_type="A100"), {"GPU": 1.0})
    text = no_room(wanted, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.5}, 0.0)
    assert "GPU 1, accelerator_type:A100 0.001" in text
    assert "accelerator_type:A100 0 free of 0" in text


def test_one_more_worker_takes_what_is_left() -> None:
    any_kind, total = ClusterConfig(), {"CPU": 8.0, "GPU": 2.0}
    gpu, cpu = {"GPU": 1.0}, {"CPU": 1.0}
    assert next_bundle(any_kind, total, [], 9) == gpu
    assert next_bundle(any_kind, total, [gpu], 9) == gpu
    assert next_bundle(any_kind, total, [gpu, gpu], 9) == cpu
    assert next_bundle(any_kind, total, [cpu, gpu], 9) == gpu, "a lost one is replaced by its like"
    assert next_bundle(any_kind, {"CPU": 8.0}, [cpu, cpu], 1) == cpu


def test_beyond_the_fewest_a_cluster_with_gpus_is_asked_for_gpus() -> None:
    held = [{"GPU": 1.0}] * 2
    assert next_bundle(ClusterConfig(), {"CPU": 8.0, "GPU": 2.0}, held, 2) == {"GPU": 1.0}
    asked = ClusterConfig(resources_per_worker={"CPU": 3.0})
    assert next_bundle(asked, {"CPU": 8.0, "GPU": 2.0}, held, 2) == {"CPU": 3.0}


def test_how_many_workers_a_cluster_can_hold() -> None:
    """By nodes: two halves of a worker on two nodes are none."""
    three = ClusterConfig(resources_per_worker={"CPU": 3.0, "fast_disk": 1.0})
    assert capacity(three, [node(0, CPU=8.0, fast_disk=9.0), node(1, CPU=2.0)]) == 2
    assert capacity(three, [node(0, CPU=8.0)]) == 0 == capacity(three, [])
    assert capacity(ClusterConfig(), [node(0, CPU=2.0, GPU=4.0), node(1, CPU=1.5)]) == 7


def test_rays_remark_on_tokens_is_not_shown(
    fake_ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors are one line: Ray's notice that a token is in use is not part of it."""
    log = logging.getLogger("ray._private.authentication.authentication_token_setup")
    with cluster.connected(config()):
        log.warning("Token authentication is enabled for this Ray cluster. Set …")
        log.warning("Token authentication is disabled for this Ray cluster. Anyone …")
    assert [record.message[:32] for record in caplog.records] == [
        "Token authentication is disabled"
    ]


def test_rays_remarks_on_dead_workers_are_not_shown(
    fake_ray: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private import worker

    with cluster.connected(config()):
        line = {"lines": ["A worker died"], "pid": "raylet", "is_err": False, "ip": "10.0.0.1"}
        worker.print_to_stdstream(line, ignore_prefix=False)
    assert capsys.readouterr().out == ""


def test_a_folder_for_sockets_has_a_short_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    assert site.private_folder("/runs/a").startswith("/scratch/et-")
    deep = tmp_path / ("deep" * 20)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = site.private_folder("/runs/a")
    assert folder.startswith("/tmp/et-") and folder != site.private_folder("/runs/b")


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two folders without `__init__.py`."""
    for folder, module in (("one", "nets"), ("two", "costs")):
        (tmp_path / folder / "spread_package").mkdir(parents=True)
        (tmp_path / folder / "spread_package" / f"{module}.py").write_text("def make(): ...\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    return tmp_path


def test_packages_without_an_init_file_are_sent_too(fake_ray: FakeRay, namespace: Path) -> None:
    model = ModelConfig(target="spread_package.nets:make")
    loss = LossConfig(target="spread_package.costs:make")
    own = config("auto", model=model, loss=loss)
    with cluster.connected(own):
        pass
    parts = [str(namespace / folder / "spread_package") for folder in ("one", "two")]
    assert fake_ray.options["runtime_env"]["py_modules"] == [PACKAGE, *parts]
    paths = os.pathsep.join(str(namespace / folder) for folder in ("one", "two"))
    assert cluster.worker_environment(own) == {"PYTHONPATH": paths}
    assert cluster.module_folder("sys:exit") is None, "built in"


@pytest.mark.usefixtures("fake_ray")
@pytest.mark.parametrize("address", [None, "auto"])
def test_an_address_of_ray_client_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ClusterError, match="Ray Client.*HOST:PORT of the cluster's GCS"):
        cluster.resolve_address(address)
    assert cluster.resolve_address("local") == "local"
