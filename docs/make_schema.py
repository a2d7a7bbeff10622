"""Makes docs/reference/plan.schema.json, the JSON schema of plan.json: --write, or --check.

The schema follows from the types by which ``cost_models.plan_file`` checks a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cost_models.plan_file import plan_schema  # noqa: E402

SCHEMA: Final = ROOT / "docs" / "reference" / "plan.schema.json"


def main() -> None:
    """Write the schema, or exit with 1 where it differs from the code.

    The order of its keys is that of msgspec, which differs by release.
    """
    text = json.dumps(plan_schema(), indent=2) + "\n"
    if "--write" in sys.argv[1:]:
        SCHEMA.write_text(text, encoding="utf-8")
    elif not SCHEMA.exists() or json.loads(SCHEMA.read_text(encoding="utf-8")) != json.loads(text):
        print("docs/reference/plan.schema.json: python docs/make_schema.py --write")
        sys.exit(1)


if __name__ == "__main__":
    main()
