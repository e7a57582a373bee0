"""Secrets: a password given in any way is printed, stored and listed nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bus import client
from miles_async.cli.app import main
from miles_async.console.report import write_report
from miles_async.settings.addresses import PASSWORD, take_password
from miles_async.settings.dump import dump_toml
from miles_async.settings.load import settings_from

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("redis://bob:pw@h:1/0?ssl_check_hostname=1&password=x", "redis://bob@h:1/0?ssl_check_hostname=1"),
        ("rediss://:pw@h", "rediss://default@h"),
        ("redis://h:1/0?password=pw&username=bob", "redis://bob@h:1/0"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("unix://:a%3Fb%2Fc@/run/r.sock", "unix://default@/run/r.sock"),
        ("no address", "no address"),
    ],
)
def test_what_is_left_of_a_url_still_names_user_and_options(url, bare):
    assert take_password(url) == bare
    assert take_password(bare) == bare


def test_both_floors_look_into_the_same_variable():
    assert client.PASSWORD == PASSWORD


def test_settings_hold_no_password_in_whatever_way_it_was_given():
    settings = settings_from(
        hf_checkpoint="m", prompt_data="d.jsonl", num_rollout=3, rm_type="math", bus_url="redis://u:hunter%2F2@h:1/0"
    )
    assert settings.bus.bus_url == "redis://u@h:1/0" and "hunter" not in dump_toml(settings)
    assert os.environ[PASSWORD] == "hunter/2"


@pytest.mark.skipif(sys.platform != "linux", reason="the process list is overwritten on Linux only")
def test_a_password_on_the_command_line_leaves_the_process_list(tmp_path):
    words = ["status", "--bus-url", "redis://u:hunter2@h:1/0", "--bus-url=redis://:hunter2@h:2"]
    code = (
        "import sys; from miles_async.cli.secrets import take_passwords\n"
        "print(*take_passwords(sys.argv[1:]), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "status --bus-url redis://u@h:1/0 --bus-url=redis://default@h:2\n"
        seen = Path(f"/proc/{child.pid}/cmdline").read_bytes()
        child.communicate("")
    assert b"status" in seen and b"hunter2" not in seen


@pytest.mark.parametrize("command", ["status", "worker", "doctor", "ledger", "stop"])
def test_no_command_shows_the_password_of_a_server_that_is_not_there(command, capfd):
    assert main([command, "--run", "r", "--bus-url", "redis://bob:s3cretpw@127.0.0.1:1/0"]) == 2
    said = capfd.readouterr()
    assert "s3cretpw" not in said.out + said.err and "127.0.0.1:1" in said.err


def test_a_report_names_services_without_what_is_shown_to_them(tmp_path):
    flags = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x", "num_rollout": 1, "rm_type": "remote_rm"}
    stored = dump_toml(settings_from(**flags, rm_url=["http://me:hidden@host:5/rm?key=hidden", "http://host/broken"]))
    assert "http://host/broken" in stored
    (tmp_path / "settings.toml").write_text(stored.replace("http://host/broken", "http://[hidden"))
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "knob", "wall": 1.0, "epoch": 0, "values": {"rm_url": ["http://u:hidden@h"]}}\n'
    )
    page = write_report(tmp_path).read_text("utf-8")
    assert "http://host:5/rm" in page and "hidden@" not in page and "key=hidden" not in page
