"""Replicas on Ray Serve: engines of their own behind one address, started anew where one fails. Needs the extra `ray`.

python:     serve.run(application(path, ServiceOptions(model_names=("name",)), num_replicas=2))
terminal:   jattn serve CHECKPOINT --replicas 2

Ray's proxy gives each request to the replica that has the fewest; it streams, and cancels where a client goes. With
`by_prefix` a front chooses the replica (`jattn/server/ray_front.py`).
"""

import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from jattn.checkpoint import Checkpoint
from jattn.server.app import make_app
from jattn.server.device_sizes import sizes_for_device
from jattn.server.run import Lifetime, prepare_interpreter
from jattn.server.service import Service, ServiceOptions
from jattn.serving.config import EngineConfig
from jattn.serving.frontend.llm import LLM

_NAME = "jattn"
_FRONT = "jattn.server.ray_front"  # imports Ray
_HEALTH_SECONDS = 5.0  # between two looks at a replica
_MOST_REQUESTS = 100_000  # a replica's own queue says what is too many: it answers 503 and when to come again


class Replica:
    """A server without a socket: Ray brings the requests.

    Args:
        path: The checkpoint's folder, on every machine that may run a replica.
        knobs: Keywords of `LLM`; the sizes that they leave open are a server's.
        watchdog_seconds: A replica whose step takes so long is replaced.
    """

    def __init__(self, path: str, options: ServiceOptions, knobs: Mapping[str, Any], watchdog_seconds: float):
        self._service = Service(LLM(path, **sizes_for_device(knobs)), options)
        self._watchdog_seconds = watchdog_seconds
        prepare_interpreter()

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_app(self._service)

    async def check_health(self) -> None:
        """Ray asks, and replaces a replica that raises.

        Raises:
            RuntimeError: It cannot go on.
        """
        thread = self._service.thread
        if thread.death is not None:
            raise RuntimeError(thread.death)
        if thread.seconds_in_step > self._watchdog_seconds:
            raise RuntimeError(f"A step of the engine has not ended in {self._watchdog_seconds:g} s.")


def application(
    path: str | os.PathLike[str],
    options: ServiceOptions,
    *,
    num_replicas: int | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    by_prefix: bool = False,
    drain_seconds: float = 30.0,
    watchdog_seconds: float = 300.0,
    actor_options: Mapping[str, Any] | None = None,
    **knobs: Any,
) -> Any:
    """An application for `serve.run`; asks the cluster for its GPUs unless told what a replica is to have.

    Args:
        path: The checkpoint's folder, on every machine that may run a replica.
        num_replicas: How many, always; 1 by default.
        autoscaling: Fields of Ray's `AutoscalingConfig` in its place, such as `min_replicas`, `max_replicas` and
            `target_ongoing_requests`.
        by_prefix: Whether a request goes to the replica that was sent the most of what it begins with, which may have
            that in its prefix cache, in place of the one with the fewest requests. All then go through one process
            more.
        drain_seconds: What the requests of a replica that is to stop get to end, as when another version is deployed.
        watchdog_seconds: A replica whose step takes so long is replaced.
        actor_options: Of Ray's, for each replica, such as `num_gpus`; by default the GPUs that its model is shared
            among, or where Ray knows no GPU a core for each device.
        knobs: Other keywords of `LLM`.

    Raises:
        NotImplementedError: Ray is not installed.
        FileNotFoundError, ValueError: There is no checkpoint, or a value is not what it should be.
    """
    ray = _ray()
    if num_replicas is not None and (type(num_replicas) is not int or num_replicas < 1):
        raise ValueError(f"`num_replicas` must be a number of at least 1. Got {num_replicas!r}.")
    if num_replicas is not None and autoscaling is not None:
        raise ValueError("`num_replicas` and `autoscaling` must not both be given: either says how many there are.")
    EngineConfig(**{name: value for name, value in knobs.items() if value is not None})
    path = str(Checkpoint(Path(path)).path.resolve())
    number = {"autoscaling_config": dict(autoscaling)} if autoscaling else {"num_replicas": num_replicas or 1}
    common = {"max_ongoing_requests": _MOST_REQUESTS, "graceful_shutdown_timeout_s": drain_seconds}
    own = {
        "name": _NAME,
        "health_check_period_s": _HEALTH_SECONDS,
        "ray_actor_options": dict(actor_options or _devices(ray, knobs.get("tensor_parallel") or 1)),
        **common,
        **number,
    }
    arguments = (path, options, knobs, watchdog_seconds)
    if not by_prefix:
        return ray.serve.deployment(**own)(ray.serve.ingress()(Replica)).bind(*arguments)
    behind = importlib.import_module(_FRONT)
    own["request_router_config"] = {"request_router_class": f"{_FRONT}.PrefixRouter"}
    replicas = ray.serve.deployment(**own)(behind.ReplicaBehind).bind(*arguments)
    front = ray.serve.deployment(name=f"{_NAME}-front", ray_actor_options={"num_cpus": 0}, **common)
    return front(ray.serve.ingress()(behind.Front)).bind(replicas, options.max_body_bytes)


def run(
    path: str | os.PathLike[str],
    options: ServiceOptions,
    listening: socket.socket,
    lifetime: Lifetime,
    on_ready: Callable[[], None],
    **arguments: Any,
) -> None:
    """Serves until SIGTERM or Ctrl-C, in the cluster that `RAY_ADDRESS` names or in one of this machine alone.

    Args:
        listening: Where; closed at once, for Ray to listen there.
        on_ready: Called once all replicas serve.
        arguments: Others of `application`.

    Raises:
        NotImplementedError: Ray is not installed.
        RuntimeError: No replica could begin; the message has the reason.
    """
    (host, port), ended = listening.getsockname()[:2], threading.Event()
    listening.close()
    ray = _ray()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    seconds = {"drain_seconds": lifetime.drain_seconds, "watchdog_seconds": lifetime.watchdog_seconds}
    try:
        served = application(path, options, **seconds, **arguments)
        ray.serve.start(http_options={"host": host, "port": port})
        ray.serve.run(served, name=_NAME, route_prefix="/")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        on_ready()
        ended.wait()
        ray.serve.delete(_NAME)  # once what runs has ended
    finally:
        ray.shutdown()


def _devices(ray: Any, number: int) -> dict[str, int]:
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    return {"num_gpus": number} if ray.cluster_resources().get("GPU", 0) > 0 else {"num_cpus": number}


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    try:
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise NotImplementedError(f"Replicas need Ray: install the extra `jattn[ray]`. Got: {error}.") from error
    return importlib.import_module("ray")
