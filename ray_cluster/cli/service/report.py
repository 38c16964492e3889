"""What ``serve`` says once everything runs: what runs where, URLs, and calls that work."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from ray_cluster.cli.output import command, print_table
from ray_cluster.config.kinds import KINDS
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.http import HttpConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.protocol.leases import Registration

EXAMPLE_PROMPT = "a large red circle in the center on a white background"


def base_url(http: HttpConfig) -> str:
    """Return a URL at which this machine reaches the API."""
    return url_of(http.host, http.port)


def url_of(listens_at: str, port: int) -> str:
    """Return a URL at which this machine reaches what listens at an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listens_at, listens_at)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_service_warnings(config: ClusterConfig) -> list[str]:
    """Return a warning for everything that strangers could use."""
    warnings = []
    http, ray = config.http, config.ray
    if http.is_open and not http.is_loopback:
        warnings.append(
            f"ANYBODY who reaches {http.host}:{http.port} can use this service: no API key is "
            "set. Set http.api_keys (or RAY_CLUSTER_API_KEYS), or listen on 127.0.0.1."
        )
    if ray.address is None and ray.auth == "disabled":
        warnings.append(
            "ANYBODY who reaches Ray's own ports on this machine can run code on it: ray.auth is "
            "'disabled'. Set it to 'token', or close the ports to others."
        )
    return warnings


def print_report(
    console: Console,
    config: ClusterConfig,
    loaded: Mapping[str, Registration],
    replicas: Mapping[str, Mapping[str, int]],
    *,
    dashboard_url: str | None,
    logs: str,
    ray_address: str | None = None,
) -> None:
    """Print the whole report.

    Args:
        loaded: a replica of each pool that has one.
        replicas: running replicas by application and deployment.
        logs: folder of all logs.
        ray_address: at which commands reach this service's Ray.
    """
    print_table(console, _table(config, loaded, replicas))
    url = base_url(config.http)
    rows = {"API": f"{url}/v1", "docs": f"{url}/docs"}
    if dashboard_url is not None:
        ask = (
            f" (asks for what '{command('ray')} get-auth-token' prints)"
            if config.ray.auth == "token"
            else ""
        )
        rows["dashboard"] = dashboard_url + ask
    if ray_address is not None:
        rows["Ray"] = ray_address
    for name, value in (rows | {"logs": logs}).items():
        console.print(f"  [bold]{name:<10}[/bold] {value}")
    if (model := example_model(config, loaded)) is None:
        text = f"send an image to {url}/images/edits, or 'generate' with --edit"
        _print_example(console, "Every model here changes images", text)
    else:
        _print_example(console, "Make an image", generate_example(config, model))
        _print_example(console, "Or with curl", curl_example(config, model))
        _print_example(console, "Or with the openai client", openai_example(config, model))
    console.print("\nCtrl-C stops the service.")


def _table(
    config: ClusterConfig,
    loaded: Mapping[str, Registration],
    replicas: Mapping[str, Mapping[str, int]],
) -> Table:
    table = Table("application", "deployment", "replicas", "what", box=box.SIMPLE)
    pools = {pool.name: pool for pool in config.pools}
    for application, count_by_deployment in replicas.items():
        for deployment, count in sorted(count_by_deployment.items()):
            pool, one = pools.get(application), loaded.get(application)
            what = _what(application, deployment, pool, one, config)
            table.add_row(application, deployment, str(count), what)
    return table


def _what(
    application: str,
    deployment: str,
    pool: PoolConfig | None,
    loaded: Registration | None,
    config: ClusterConfig,
) -> str:
    if pool is None:
        scorer = next((one for one in config.discriminators if one.name == application), None)
        if scorer is not None:
            cascades = [one.name for one in config.cascades if one.discriminator == application]
            return f"{scorer.model} on {scorer.device}, for {', '.join(cascades) or 'no cascade'}"
        control = next((one for one in config.controlnets if one.name == application), None)
        if control is not None:
            return f"{control.model} on {control.device}, for {', '.join(control.bases)}"
        front = {
            "Gateway": f"HTTP on {config.http.host}:{config.http.port}",
            "Dispatcher": f"queue of at most {config.limits.max_queued_images} images",
            **{row.deployment: f"{row.work} of images" for row in KINDS.values() if row.work},
            "LoraStore": f"files of LoRAs in {config.loras.folder}",
            "Controller": f"plans replicas every {config.control.period_s:g} s",
        }
        return front.get(deployment, "")
    words = None if loaded is None else loaded.words
    number_format = pool.number_format() if words is None else words.number_format
    device = f"{pool.device}, {number_format}" if number_format else pool.device
    device += f", {pool.num_gpus:g} GPU" if pool.num_gpus else f", {pool.num_threads} thread(s)"
    profile = None if loaded is None else loaded.profile
    how = f"{pool.ranks} ranks" if pool.is_group else f"batches of at most {pool.max_batch}"
    if profile is not None and profile.engine == "diffusers":
        how = "one image a call"
    lines = [f"{pool.model_name}: {pool.files_words} on {device}; {how}"]
    lines += [
        f"the cascade {one.name} begins here; {one.heavy} makes anew what this does badly"
        for one in config.cascades
        if one.light == pool.model_name
    ]
    if profile is not None:
        lines.append(
            f"{profile.family}; sides of {profile.min_px} to {profile.max_px} px in steps of "
            f"{profile.size_multiple_px}"
        )
    if words is not None:
        lines += [f"sampling {words.sampling}", f"memory {words.memory}"]
    return "\n".join(lines)


def _print_example(console: Console, title: str, text: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    console.print(text, markup=False)


def example_model(config: ClusterConfig, loaded: Mapping[str, Registration]) -> str | None:
    """Return the model that examples name, empty for the default one; None if all need an image."""
    for pool in (one for one in config.pools if one.name in loaded or not loaded):
        profile = loaded[pool.name].profile if loaded else None
        if profile is None or not (profile.edits == "masked" or profile.min_references):
            return "" if pool.model_name == config.pools[0].model_name else pool.model_name
    return None


def generate_example(config: ClusterConfig, model: str = "") -> str:
    """Return a command line that makes an image."""
    key = "" if config.http.is_open else " --api-key $KEY"
    call = f'{command()} generate "{EXAMPLE_PROMPT}"{f" --model {model}" * bool(model)}'
    return f"{call} --url {base_url(config.http)}{key} -o red.png"


def curl_example(config: ClusterConfig, model: str = "") -> str:
    """Return a curl call that works as it is; with keys, once ``KEY`` is set."""
    chosen = {"model": model} if model else {}
    body = json.dumps(chosen | {"prompt": EXAMPLE_PROMPT, "seed": 1})
    key = "" if config.http.is_open else '  -H "Authorization: Bearer $KEY" \\\n'
    save = (
        "import base64, json, sys; "
        'sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))'
    )
    return (
        f"curl -s {base_url(config.http)}/v1/images/generations \\\n{key}"
        f"  -H 'Content-Type: application/json' -d '{body}' \\\n"
        f"  | python3 -c '{save}' > red.png"
    )


def openai_example(config: ClusterConfig, model: str = "") -> str:
    """Return a Python program that works as it is; with keys, once ``KEY`` is set."""
    key = '"none"' if config.http.is_open else 'os.environ["KEY"]'
    imports = "import base64" if config.http.is_open else "import base64, os"
    chosen = f'model="{model}", ' * bool(model)
    return (
        f"{imports}\n"
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{base_url(config.http)}/v1", api_key={key})\n'
        f'reply = client.images.generate({chosen}prompt="{EXAMPLE_PROMPT}", '
        'extra_body={"seed": 1})\n'
        'open("red.png", "wb").write(base64.b64decode(reply.data[0].b64_json))'
    )
