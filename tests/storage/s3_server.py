"""A real server of S3: moto's, which checks signatures and policies, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.service import free_ports

REGION = "eu-central-1"
# entries that it lists at a time; a thousand are usual
PAGE = 10
# calls that come before it asks who calls: that it is up, and those that make the first user
_MAKE_USER = 3
_POLICY = (
    '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}}'
)


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server, and what a pod that uses it has as variables."""

    endpoint: str
    key: str
    secret: str

    @property
    def variables(self) -> dict[str, str]:
        return variables(self.endpoint, self.key, self.secret)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process be such a pod until the test ends."""
        use(monkeypatch, self.variables)

    def make_bucket(self, name: str) -> str:
        """Make an empty bucket; return its URL."""
        self._client("s3").create_bucket(
            Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION}
        )
        return f"s3://{name}"

    def names(self, bucket: str) -> list[str]:
        """Return the keys of a bucket."""
        rows = self._client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
        return [row["Key"] for row in rows]

    def open_uploads(self, bucket: str) -> int:
        """Return how many uploads in parts are neither ended nor given up."""
        return len(self._client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", []))

    def _client(self, service: str):
        return _client(service, self.endpoint, self.key, self.secret)


def variables(endpoint: str, key: str, secret: str) -> dict[str, str]:
    """Return what botocore, and so s3fs, reads of its surroundings."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": REGION,
    }


def use(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """Set the variables, and no others of AWS."""
    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """A server that runs within the block, with one user who may use all buckets."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("s3fs") is None:
        pytest.skip("moto[server] and s3fs are not installed (extra dev)")
    [port] = free_ports(1)
    # by name, as an operator's MinIO is
    endpoint = f"http://localhost:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=os.environ
        | {
            "INITIAL_NO_AUTH_ACTION_COUNT": str(_MAKE_USER),
            "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(server, endpoint)
        yield _with_user(endpoint)
    finally:
        server.terminate()
        server.wait(10)


def _wait(server: subprocess.Popen[bytes], endpoint: str) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        assert server.poll() is None, "moto's server has ended"
        assert time.monotonic() < deadline_s, "moto's server does not answer"
        try:
            httpx.get(f"{endpoint}/moto-api/")
        except httpx.HTTPError:
            time.sleep(0.05)
        else:
            return


def _with_user(endpoint: str) -> S3Server:
    iam = _client("iam", endpoint, "nobody", "nobody")
    iam.create_user(UserName="service")
    iam.put_user_policy(UserName="service", PolicyName="s3", PolicyDocument=_POLICY)
    made = iam.create_access_key(UserName="service")["AccessKey"]
    return S3Server(endpoint, made["AccessKeyId"], made["SecretAccessKey"])


def _client(service: str, endpoint: str, key: str, secret: str):
    import boto3

    return boto3.client(
        service,
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name=REGION,
    )
