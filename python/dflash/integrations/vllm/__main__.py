# SPDX-License-Identifier: Apache-2.0
"""Which parts the plugin would take over in an unpacked vLLM wheel: python -m dflash.integrations.vllm FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

from dflash.integrations.vllm.known import PARTS
from dflash.integrations.vllm.sources import reason_to_leave, source_hash


def main() -> None:
    root = Path(sys.argv[1])
    (info,) = root.glob("vllm-*.dist-info")
    version = info.name.removesuffix(".dist-info").partition("-")[2].partition("+")[0]
    for part in PARTS:
        reason = reason_to_leave(root, version, part)
        print(f"{version}: {part.name}: {'taken over' if reason is None else 'left: ' + reason}")
        if "--hashes" not in sys.argv:
            continue
        for function in {name: 0 for known in part.versions.values() for name in known.functions}:
            print(f'    "{function}": "{source_hash(root, function)}",')


if __name__ == "__main__":
    main()
