# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash`: the command where its script is not on the path."""

from dflash.cli import main

main()
