"""Who computes yields the cores to who starts."""

import os
import subprocess
import sys

import pytest

from actors.runtime.priority import COMPUTE_NICE

CODE = "import os; from actors.runtime.priority import COMPUTE_NICE, lower_to; lower_to(COMPUTE_NICE); print(os.nice(0))"


@pytest.mark.parametrize("own_session", [True, False])
def test_only_a_process_in_a_session_of_its_own_is_lowered(own_session: bool) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], start_new_session=own_session, capture_output=True, text=True, timeout=60)
    before = os.nice(0)
    assert int(done.stdout) == (max(before, COMPUTE_NICE) if own_session else before), done.stderr
