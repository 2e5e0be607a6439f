# SPDX-License-Identifier: Apache-2.0
"""dflash under other runtimes; each module imports its runtime, and only when it is used."""
