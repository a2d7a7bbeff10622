"""Where the command line begins: an interruption while it still loads is one line, too."""

from __future__ import annotations

import gc
import os


def main() -> None:
    """Run ``shardplan``."""
    try:
        from planner.search.gc_pause import fewer_collections

        with fewer_collections():
            try:
                from planner.cli.app import main as run

                run()
            finally:
                gc.freeze()  # what ends with the process is not searched for cycles
    except KeyboardInterrupt:
        os.write(2, b"shardplan: interrupted\n")
        os._exit(130)


if __name__ == "__main__":
    main()
