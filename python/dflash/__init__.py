# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding."""

from dflash import _library as _library
from dflash._conflict import report_conflict

report_conflict()

__version__ = "0.1.0"
