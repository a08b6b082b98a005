"""R1 in small: a sample of the cuts, with every rare moment among them, and its controls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("crash_images.py")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_a_crash_at_a_write_leaves_is_whole_and_lost_nothing(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A sample of images opens, is a store after some commit that lost no promise, and goes on.

    `R1_IMAGES` and `R1_SEED` in the environment say how many, and which.
    """
    # C075, C077
    if "slow" not in str(request.config.getoption("-m")):
        pytest.skip("takes a minute; run it with -m slow")
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={"R1_IMAGES": "200", **os.environ},
    )
    with capsys.disabled():
        print(f"\n{done.stdout}", end="")

    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
    assert done.stdout.rstrip().endswith("PASS")
