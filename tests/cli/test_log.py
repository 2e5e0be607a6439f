# SPDX-License-Identifier: Apache-2.0
import logging
import subprocess
import sys

import pytest

from dflash import log


def test_log_once(caplog):
    with caplog.at_level(logging.INFO, logger="dflash"):
        for _ in range(3):
            log.log_once("said once: test_log_once")
        log.log_once("said once, quietly: test_log_once", logging.INFO)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


def test_level_from_environment(monkeypatch):
    monkeypatch.setenv("DFLASH_LOG_LEVEL", "debug")
    assert log.level_from_environment() == logging.DEBUG
    monkeypatch.setenv("DFLASH_LOG_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="DFLASH_LOG_LEVEL='LOUD' is not a level: expected one of"):
        log.level_from_environment()


def test_a_bad_level_is_one_line_and_does_not_stop_the_import(monkeypatch):
    monkeypatch.setenv("DFLASH_LOG_LEVEL", "LOUD")
    done = subprocess.run(
        [sys.executable, "-c", "import dflash.log as l; l.logger.warning('on')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr.count("\n") == 2
    assert done.stderr.startswith("dflash: warning: DFLASH_LOG_LEVEL='LOUD' is not a level")
