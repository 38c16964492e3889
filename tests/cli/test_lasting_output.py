"""Standard output whose reader has gone."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
from ray_cluster.cli.service.lasting_output import lasting_output
with lasting_output():
    print("first")
    sys.stdin.read()
    print("dropped")
    print("dropped")
sys.stderr.write("ended")
"""


def test_writing_goes_on_when_the_reader_is_gone_and_the_exit_code_is_0() -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write_end)
        with open(read_end) as reader:
            assert reader.readline() == "first\n"
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "ended")
